"""Memory that two processes see, for tensors on their way between them."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from ..storage.dtypes import dtype_name, dtype_of

Place = tuple[int, str, tuple[int, ...]]
"""Where a tensor lies: offset in bytes, dtype, shape."""
_ALIGNED = 64
_INCOMPLETE, _COMPLETE = b"\0", b"\1"


class SharedBuffer:
    """Has a file descriptor, to be passed on, and no name: it is gone with its holders."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = nameless_file() if fd is None else fd
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def place(self, tensors: Sequence[Tensor]) -> tuple[Place, ...]:
        """Where to copy tensors like these, over what was there. The memory grows if it has to."""
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
        return [self._view(*place) for place in places]

    def _view(self, at: int, name: str, shape: Sequence[int]) -> Tensor:
        dtype = dtype_of(name)
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        if at + size > self._bytes.numel():
            # views of the smaller map keep it; both are the same memory
            mapped = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
            with torch.inference_mode(False):
                self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        with torch.inference_mode(False):  # in it, they could not be written outside of it
            return self._bytes[at : at + size].view(dtype).view(shape)

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


def fill(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy values into views of shared memory, and nothing of their history: the graph behind a tensor would
    live as long as the memory does."""
    for view, t in zip(views, tensors, strict=True):
        view.copy_(t.detach() if t.requires_grad else t)


def write_file(fd: int, data: bytes) -> None:
    """Write all of an empty file. ``read_file`` gives nothing until it is complete."""
    rest = memoryview(_INCOMPLETE + data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.pwrite(fd, _COMPLETE, 0)


def read_file(fd: int) -> bytes:
    """What ``write_file`` wrote, in whichever process; empty if it was never completed."""
    size, parts, at = os.fstat(fd).st_size, [], 1
    if os.pread(fd, 1, 0) != _COMPLETE:
        return b""
    while at < size:  # one call reads 2 GB at most
        parts.append(os.pread(fd, size - at, at))
        at += len(parts[-1])
    return b"".join(parts)


def nameless_file() -> int:
    """A file descriptor of memory that is gone with its holders."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tpcore")  # not in /dev/shm, which containers make small
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())
