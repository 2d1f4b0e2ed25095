"""Memory shared by two processes, to pass tensors between them."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checkpoint.storage.tensorfile import dtype_name, dtype_of

Place = tuple[int, str, tuple[int, ...]]
"""A tensor in a buffer: offset in bytes, dtype, shape."""
_ALIGNED = 64
_MEMORY = "/dev/shm"
_INCOMPLETE, _COMPLETE = b"\0", b"\1"


class SharedBuffer:
    """Shared memory behind a file descriptor without a name: freed when the last holder closes it."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = nameless_file() if fd is None else fd
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def place(self, tensors: Sequence[Tensor]) -> tuple[Place, ...]:
        """Places for tensors of these shapes and dtypes, from offset 0. Grows the memory if necessary."""
        places: list[Place] = []
        end = 0
        for t in tensors:
            places.append((end, dtype_name(t.dtype), tuple(t.shape)))
            end += -(-t.nbytes // _ALIGNED) * _ALIGNED
        if end > self._bytes.numel():
            os.ftruncate(self.fd, end)
        return tuple(places)

    def get(self, places: Sequence[Place]) -> list[Tensor]:
        """Tensors that are views of the memory at ``places``."""
        return [self._view(*place) for place in places]

    def _view(self, at: int, name: str, shape: Sequence[int]) -> Tensor:
        dtype = dtype_of(name)
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        if at + size > self._bytes.numel():
            # earlier views keep the smaller map alive; both maps show the same memory
            mapped = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
            with torch.inference_mode(False):
                self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
            return self._bytes[at : at + size].view(dtype).view(shape)

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


def fill(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy values into views of shared memory. Detached: otherwise views keep the autograd graph alive."""
    for view, t in zip(views, tensors, strict=True):
        view.copy_(t.detach() if t.requires_grad else t)


def write_file(fd: int, data: bytes) -> None:
    """Write the contents of an empty file. ``read_file`` returns nothing until they are complete."""
    rest = memoryview(_INCOMPLETE + data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.pwrite(fd, _COMPLETE, 0)


def read_file(fd: int) -> bytes:
    """The bytes that ``write_file`` wrote, in any process. Empty if it did not complete."""
    size, parts, at = os.fstat(fd).st_size, [], 1
    if os.pread(fd, 1, 0) != _COMPLETE:
        return b""
    while at < size:  # one call reads at most 2 GB
        parts.append(os.pread(fd, size - at, at))
        at += len(parts[-1])
    return b"".join(parts)


def nameless_file() -> int:
    """A file descriptor of anonymous memory, which is freed when the last descriptor is closed. Other users
    cannot open it, and nobody can make it shorter: to read behind the end would kill a process."""
    if not hasattr(os, "memfd_create"):  # a Python for an older glibc
        with tempfile.TemporaryFile(dir=_MEMORY if os.path.isdir(_MEMORY) else None) as f:
            return os.dup(f.fileno())
    # not in /dev/shm, which containers make small
    fd = os.memfd_create("tpcore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd
