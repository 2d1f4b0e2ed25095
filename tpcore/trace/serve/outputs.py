"""How outputs reach the caller without a copy: in memory that the first rank writes and the caller keeps."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ...processes.shared_memory import SharedBuffer
from ...storage.dtypes import dtype_of
from ..inputs import Layout
from .messages import encoded, value_of

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which the mmap module does not name
LENT = 3
"""Buffers of outputs. A caller in a loop still holds one output while it asks for the next."""


class Written:
    """A rank's side of one buffer."""

    def __init__(self, fd: int) -> None:
        self._buffer = SharedBuffer(fd)
        self._layout: Layout | None = None

    def put(self, tensors: Sequence[Tensor]) -> bytes:
        """Where they lie, ``encoded``."""
        layout = [(t.dtype, t.shape) for t in tensors]
        if layout != self._layout:  # most are like the ones before
            places = self._buffer.place(tensors)
            self._views, self._places = self._buffer.get(places), encoded(places)
            self._layout = layout
        for view, t in zip(self._views, tensors, strict=True):
            view.copy_(t)
        return self._places


class Lent:
    """The owner's side of one buffer. Tensors of it are the caller's to keep and to write into: while one
    is left, or a view or an array made of one, the buffer is ``held``.

    The map is private: what is written into the tensors is seen by nobody else, a fork included. What a rank
    writes is seen in all pages that the caller has not written into.
    """

    def __init__(self) -> None:
        self._buffer = SharedBuffer()
        self.fd = self._buffer.fd
        self._answer = b""
        self._form: list[tuple[torch.dtype, int, int, torch.Size]] = []
        self._end = 0
        self._map: mmap.mmap | None = None
        self._view: Callable[[], memoryview | None] = _nothing  # torch.frombuffer keeps it for its tensor
        self._kept: memoryview | None = None

    @property
    def held(self) -> bool:
        return self._view() is not None

    def keep(self) -> None:
        """What is held now stays held."""
        self._kept = self._view()

    def expected(self) -> list[Tensor]:
        """The outputs to come, if they will be like the last ones. To be made while the ranks compute."""
        view = None if self._map is None else self._fresh(self._map)
        return [
            torch.frombuffer(view, dtype=dtype, count=count, offset=at).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
            for dtype, count, at, shape in self._form
        ]

    def _fresh(self, mapped: mmap.mmap) -> memoryview:
        try:
            mapped.madvise(mmap.MADV_DONTNEED)  # drops pages that the last holder has written into
        except OSError:  # it has locked them into memory
            mapped = self._map = mmap.mmap(self.fd, len(mapped), access=mmap.ACCESS_COPY)
        with suppress(OSError):  # an older kernel, where the caller's first look costs more
            mapped.madvise(_POPULATE_READ, 0, self._end)
        view = memoryview(mapped)
        self._view = weakref.ref(view)
        return view

    def taken(self, answer: bytes, expected: list[Tensor]) -> list[Tensor]:
        """The outputs, which lie there now as ``answer`` says."""
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
        """The tensors stay as they are."""
        self._map = None
        self._buffer.close()


class OutputBuffers:
    """``LENT`` buffers, and one more that outputs are copied from while the caller holds all of those."""

    def __init__(self) -> None:
        self.buffers = [Lent() for _ in range(LENT + 1)]
        keep = weakref.WeakMethod(self._keep)

        def forked() -> None:
            if (method := keep()) is not None:
                method()

        os.register_at_fork(after_in_parent=forked)

    def free(self) -> int:
        """The number of the buffer for the next outputs."""
        for n in range(LENT):
            if not self.buffers[n].held:
                return n
        return LENT

    def taken(self, n: int, answer: bytes, expected: list[Tensor]) -> list[Tensor]:
        """What buffer ``n`` has for the caller."""
        tensors = self.buffers[n].taken(answer, expected)
        return [t.clone() for t in tensors] if n == LENT else tensors

    def _keep(self) -> None:
        """A fork may hold the outputs in use for as long as it likes: nothing is written there any more."""
        for buffer in self.buffers[:LENT]:
            buffer.keep()

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()


def _nothing() -> None:
    return None
