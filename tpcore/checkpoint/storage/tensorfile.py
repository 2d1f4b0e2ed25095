"""One safetensors file: written in one pass, read region by region into existing tensors; names of dtypes."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import resource
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import CheckpointError
from ...layout.slices import narrowed
from .files import CHUNK, SILENT, FileRecord, Progress, chunks, crc32_text, loads, naming, open_regular, write_parts

# Only names that safetensors knew before 0.4.3, so that every version can read the files written here.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if re.fullmatch(r"[a-z0-9_]+", name) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def bytes_of(t: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = t.detach().as_strided((t.numel(),), (1,))  # not view(-1): dims of size 1 may have any stride
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _as_stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Dtype name and shape in the file. A dtype that safetensors has no name for is U8 with one more dim."""
    return (_NAMES[dtype], list(shape)) if dtype in _NAMES else ("U8", [*shape, dtype.itemsize])


# -- writing ------------------------------------------------------------------------------------------------
class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Writable(HasShape, Protocol):
    """A tensor to write, in pieces."""

    def pieces(self) -> Iterable[Tensor]:
        """Contiguous CPU tensors whose bytes follow each other. Called after earlier tensors are written."""


def nbytes_of(t: HasShape) -> int:
    return math.prod(t.shape) * t.dtype.itemsize


def order_of(tensors: Mapping[str, Writable]) -> list[str]:
    """Names in the order of the file: the widest elements first, so that each tensor is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_tensors(
    path: str,
    tensors: Mapping[str, Writable],
    metadata: Mapping[str, str],
    progress: Progress = SILENT,
    *,
    summed: bool = True,
) -> tuple[FileRecord, dict[str, str]]:
    """Write one file. Returns its record and the crc32 of each tensor."""
    order = order_of(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        t = tensors[name]
        (stored, shape), end = _as_stored(t.dtype, t.shape), at + nbytes_of(t)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    contents = (chunks(map(bytes_of, tensors[name].pieces()), progress) for name in order)
    record, (_, *sums) = write_parts(path, chain([[head]], contents), summed=summed)
    return record, dict(zip(order, sums, strict=True))


_MOST_DIMS = 64  # of an operation of torch


def check_dims(dims: int, what: str) -> None:
    """CheckpointError for a tensor that torch could not copy."""
    if dims > _MOST_DIMS:
        raise CheckpointError(f"{what} has {dims} dims, and a tensor of torch {_MOST_DIMS} at most: it is damaged")


# -- reading ------------------------------------------------------------------------------------------------
class TensorFile:
    """An open safetensors file. All reads use one descriptor: a rename after the checks changes nothing. Where half of
    a process's descriptors are in use, each read opens the file again, and another one there is an error."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = open_regular(path)
        self._same = _version_of(self._fd)
        self.sound: set[str] = set()  # names of tensors whose checksum was compared and matched
        try:
            # safetensors' own reader first: it detects every kind of damaged header
            with safe_open(path, "pt"):
                pass
            self.read_bytes(memoryview(head := bytearray(8)), 0)
            self.read_bytes(memoryview(text := bytearray(int.from_bytes(head, "little"))), 8)
            self._entries: dict[str, Any] = loads(bytes(text), path)
        except BaseException as e:
            self.close()
            if isinstance(e, SafetensorError | OSError | RuntimeError) and not isinstance(e, CheckpointError):
                # RuntimeError: torch cannot map the file
                raise CheckpointError(f"{path} is not a whole safetensors file: {e}") from e
            raise
        if 0 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 < self._fd:  # below 0 for no limit
            self.close()
        self._data = 8 + len(text)
        self.metadata: dict[str, str] = self._entries.pop("__metadata__", None) or {}

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _opened(self) -> int:
        """A descriptor of the same file, where none is kept."""
        fd = open_regular(self.path)
        if _version_of(fd) != self._same:
            os.close(fd)
            raise CheckpointError(f"{self.path} was replaced or written to while it was read")
        return fd

    def names(self) -> list[str]:
        return list(self._entries)

    def tensor(self, name: str) -> FileTensor:
        """A tensor as the header describes it, which safetensors has found to fit the file."""
        entry = self._entries[name]
        stored, start = entry["dtype"], self._data + entry["data_offsets"][0]
        check_dims(len(entry["shape"]), f"{self.path}: {name!r}")
        if stored not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name!r} has dtype {stored}, which is not supported")
        return FileTensor(self, name, tuple(entry["shape"]), _DTYPES[stored], start)

    def recorded(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], crc32: str) -> FileTensor:
        """A tensor that a manifest describes. CheckpointError if the file disagrees with the manifest."""
        if name not in self._entries:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        entry = self._entries[name]
        there = entry["dtype"], entry["shape"]
        check_dims(len(shape), f"{self.path}: {name!r}")
        if there != _as_stored(dtype, shape):
            raise CheckpointError(
                f"{self.path}: {name!r} is {there[0]} {there[1]}, on record {dtype_name(dtype)} {list(shape)}"
            )
        return FileTensor(self, name, shape, dtype, self._data + entry["data_offsets"][0], crc32)

    def read_bytes(self, into: memoryview, at: int) -> None:
        fd, done = self._opened() if self._fd is None else self._fd, 0
        try:
            while done < len(into):
                if not (n := os.preadv(fd, [into[done:]], at + done)):
                    raise CheckpointError(f"{self.path} is truncated")
                done += n
        except OSError as e:
            raise CheckpointError(f"cannot read {self.path}: {e.strerror or e}") from e
        finally:
            if fd != self._fd:
                os.close(fd)

    def mapped(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the mapped file. Its bytes are read at first use, so copy them soon."""
        skipped = at % mmap.ALLOCATIONGRANULARITY
        size = skipped + math.prod(shape) * dtype.itemsize
        fd = self._opened() if self._fd is None else self._fd
        with naming("map", self.path), ExitStack() as stack:
            if fd != self._fd:
                stack.callback(os.close, fd)
            if os.fstat(fd).st_size < at - skipped + size:  # access beyond the end would be SIGBUS
                raise CheckpointError(f"{self.path} is truncated")
            # ACCESS_COPY: writable, for torch has no read-only tensors
            pages = mmap.mmap(fd, size, access=mmap.ACCESS_COPY, offset=at - skipped)
        data = torch.frombuffer(pages, dtype=torch.uint8, offset=skipped)
        return (data.clone() if at % dtype.itemsize else data).view(dtype).view(shape)  # a clone is aligned


def _version_of(fd: int) -> tuple[int, ...]:
    return (found := os.fstat(fd)).st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class FileTensor:
    """One tensor of an open file. ``crc32``: None if no manifest records it."""

    file: TensorFile
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    crc32: str | None = None

    @property
    def identity(self) -> object:
        return self.file.path, self.start, nbytes_of(self)

    def verify(self) -> None:
        """Compare all bytes with the checksum, in bounded memory. CheckpointError on a mismatch."""
        if self.crc32 is None or self.name in self.file.sound:
            return
        crc, size = 0, nbytes_of(self)
        buffer = memoryview(bytearray(min(CHUNK, size)))
        for at in range(0, size, CHUNK):
            chunk = buffer[: size - at]
            self.file.read_bytes(chunk, self.start + at)
            crc = zlib.crc32(chunk, crc)
        self._compare(crc)
        self.file.sound.add(self.name)

    def _compare(self, crc: int) -> None:
        actual = crc32_text(crc)
        if actual != self.crc32:
            raise CheckpointError(
                f"{self.file.path}: {self.name!r} is damaged: its crc32 is {actual}, not {self.crc32}"
            )

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        """Fill ``out``, a CPU tensor, with the region at ``starts``. ``check``: compare a whole tensor's checksum."""
        summing = check and tuple(out.shape) == self.shape and self.crc32 is not None
        shape, out, crc = self.shape, out.detach(), 0
        if not shape:
            shape, starts, out = (1,), (0,), out.view(1)
        for at, rows, begin, band in _bands(self.start, shape, starts, out, self.dtype.itemsize):
            stored = band
            if tuple(band.shape) == rows and band.is_contiguous() and band.dtype == self.dtype:
                self.file.read_bytes(bytes_of(band), at)
            else:
                stored = self.file.mapped(at, rows, self.dtype)
                band.copy_(narrowed(stored, (0, *begin), band.shape))
            if summing:
                crc = zlib.crc32(bytes_of(stored), crc)
        if summing:
            self._compare(crc)


def _bands(
    at: int, shape: tuple[int, ...], starts: Sequence[int], out: Tensor, itemsize: int
) -> Iterator[tuple[int, tuple[int, ...], Sequence[int], Tensor]]:
    """The rows of a tensor at byte ``at`` that ``out`` takes, in bands of at most a chunk, in the order of the file:
    the band's offset and shape there, where the wanted part of each row begins, and its destination."""
    if not out.numel():
        return
    row = math.prod(shape[1:]) * itemsize
    at += starts[0] * row
    if row > CHUNK:
        for i, part in enumerate(out):
            yield from _bands(at + i * row, shape[1:], starts[1:], part, itemsize)
        return
    step = CHUNK // row
    for i in range(0, len(out), step):
        band = out[i : i + step]
        yield at + i * row, (len(band), *shape[1:]), starts[1:], band
