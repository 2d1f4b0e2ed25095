"""Memory that two processes see, for tensors on their way between them."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.dtypes import dtype_name, dtype_of

Place = tuple[int, str, tuple[int, ...]]
"""Where a tensor lies: offset in bytes, dtype, shape."""
_ALIGNED = 64


class SharedBuffer:
    """Has a file descriptor, to be passed on, and no name: it is gone with its holders."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _nameless() if fd is None else fd
        self._bytes = torch.empty(0, dtype=torch.uint8)
        # most calls are of the shapes of the one before
        self._layout: tuple[list[Any], tuple[Place, ...]] = [], ()
        self._seen: tuple[Sequence[Place], list[Tensor]] = (), []

    def put(self, tensors: Sequence[Tensor]) -> tuple[Place, ...]:
        """Copy tensors in, over what was there. The memory grows if it has to."""
        layout = [(t.dtype, t.shape) for t in tensors]
        if layout != self._layout[0]:
            self._layout = layout, self._placed(tensors)
        places = self._layout[1]
        for view, t in zip(self.get(places), tensors, strict=True):
            view.copy_(t)
        return places

    def _placed(self, tensors: Sequence[Tensor]) -> tuple[Place, ...]:
        places: list[Place] = []
        end = 0
        for t in tensors:
            places.append((end, dtype_name(t.dtype), tuple(t.shape)))
            end += -(-t.nbytes // _ALIGNED) * _ALIGNED
        if end > self._bytes.numel():
            os.ftruncate(self.fd, end)
        return tuple(places)

    def get(self, places: Sequence[Place]) -> list[Tensor]:
        """Views of tensors that either side has put there."""
        if places is not self._seen[0]:
            self._seen = places, [self._view(*place) for place in places]
        return self._seen[1]

    def _view(self, at: int, name: str, shape: Sequence[int]) -> Tensor:
        dtype = dtype_of(name)
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        if at + size > self._bytes.numel():
            # views of the smaller map keep it; both are the same memory
            mapped = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._bytes[at : at + size].view(dtype).view(shape)

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._layout, self._seen = ([], ()), ((), [])
        os.close(self.fd)


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tpcore")  # not in /dev/shm, which containers make small
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())
