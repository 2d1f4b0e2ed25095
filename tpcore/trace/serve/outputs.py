"""Outputs without a copy: the first rank writes to shared memory, and the caller keeps tensors in it."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ...checkpoint.storage.dtypes import dtype_of
from ...processes.shared_memory import SharedBuffer
from .messages import encoded, value_of

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which the mmap module does not name
OUTPUT_BUFFERS = 3
"""Number of buffers for outputs. A caller in a loop still holds one output during the next call."""


class RankBuffer:
    """The rank's side of one buffer."""

    def __init__(self, fd: int) -> None:
        self._buffer = SharedBuffer(fd)
        self._layout: list[tuple[torch.dtype, torch.Size]] | None = None

    def put(self, tensors: Sequence[Tensor]) -> bytes:
        """Copy tensors to the buffer. Returns their places, ``encoded``."""
        layout = [(t.dtype, t.shape) for t in tensors]
        if layout != self._layout:  # most calls have the layout of the previous call
            places = self._buffer.place(tensors)
            self._views, self._places = self._buffer.get(places), encoded(places)
            self._layout = layout
        for view, t in zip(self._views, tensors, strict=True):
            view.copy_(t)
        return self._places


class OwnerBuffer:
    """The owner's side of one buffer. The caller may keep its tensors and write to them. The buffer is
    ``held`` while one of them is alive, or a view or an array of one.

    The map is private (copy on write): writes of the caller are invisible to the ranks and to a fork. Writes
    of a rank are visible in all pages that the caller has not written to.
    """

    def __init__(self) -> None:
        self._buffer = SharedBuffer()
        self.fd = self._buffer.fd
        self._answer = b""
        self._form: list[tuple[torch.dtype, int, int, torch.Size]] = []
        self._end = 0
        self._map: mmap.mmap | None = None
        self._view: Callable[[], memoryview | None] = _no_view  # a tensor of torch.frombuffer keeps its view
        self._kept: memoryview | None = None

    @property
    def held(self) -> bool:
        return self._view() is not None

    def keep(self) -> None:
        """Keep the buffer ``held`` for good, if it is now."""
        self._kept = self._view()

    def expected(self) -> list[Tensor]:
        """Tensors for the next outputs, if these have the last ones' shapes. Made while the ranks compute."""
        view = None if self._map is None else self._fresh(self._map)
        return [
            torch.frombuffer(view, dtype=dtype, count=count, offset=at).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
            for dtype, count, at, shape in self._form
        ]

    def _fresh(self, mapped: mmap.mmap) -> memoryview:
        try:
            mapped.madvise(mmap.MADV_DONTNEED)  # drops private pages that the last holder has written
        except OSError:  # the program has locked its memory
            mapped = self._map = mmap.mmap(self.fd, len(mapped), access=mmap.ACCESS_COPY)
        with suppress(OSError):  # older kernels lack it: the caller's first access takes longer there
            mapped.madvise(_POPULATE_READ, 0, self._end)
        view = memoryview(mapped)
        self._view = weakref.ref(view)
        return view

    def taken(self, answer: bytes, expected: list[Tensor]) -> list[Tensor]:
        """The outputs, at the places of ``answer``: ``expected``, or new tensors if the places changed."""
        if answer == self._answer:
            return expected
        shapes = [(at, dtype_of(name), torch.Size(shape)) for at, name, shape in value_of(answer)]
        self._form = [(dtype, shape.numel(), at, shape) for at, dtype, shape in shapes]
        self._end = max((at + count * dtype.itemsize for dtype, count, at, _ in self._form), default=0)
        if self._end > (0 if self._map is None else len(self._map)):
            self._map = mmap.mmap(self.fd, self._end, access=mmap.ACCESS_COPY)
        self._answer = answer
        return self.expected()

    def close(self) -> None:
        """Tensors of the caller stay valid."""
        self._map = None
        self._buffer.close()


class OutputBuffers:
    """``OUTPUT_BUFFERS`` buffers, and one more whose outputs are copied while the caller holds the others."""

    def __init__(self) -> None:
        self.buffers = [OwnerBuffer() for _ in range(OUTPUT_BUFFERS + 1)]
        keep = weakref.WeakMethod(self._keep)

        def forked() -> None:
            if (method := keep()) is not None:
                method()

        os.register_at_fork(after_in_parent=forked)

    def free(self) -> int:
        """The number of the buffer for the next outputs."""
        for n in range(OUTPUT_BUFFERS):
            if not self.buffers[n].held:
                return n
        return OUTPUT_BUFFERS

    def taken(self, n: int, answer: bytes, expected: list[Tensor]) -> list[Tensor]:
        """The outputs in buffer ``n``, for the caller."""
        tensors = self.buffers[n].taken(answer, expected)
        return [t.clone() for t in tensors] if n == OUTPUT_BUFFERS else tensors

    def _keep(self) -> None:
        """After a fork, the child may hold current outputs forever: do not write to their buffers again."""
        for buffer in self.buffers[:OUTPUT_BUFFERS]:
            buffer.keep()

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()


def _no_view() -> None:
    return None
