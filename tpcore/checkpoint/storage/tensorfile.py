"""One safetensors file: written in one pass, read region by region into existing tensors."""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import CheckpointError
from .dtypes import DTYPES, as_stored, bytes_of, dtype_name
from .files import CHUNK, FileRecord, Progress, chunks, crc32_text, loads, naming, open_regular, write_parts

RUN = 64 << 10
"""Contiguous runs of fewer bytes are copied from the mapped file. Longer runs are read into the destination.

Half of each row of a 256 MiB tensor in the page cache: runs of 4 KiB take 87 ms read one by one and 34 ms
mapped, of 16 KiB 30 and 25 ms, of 64 KiB 27 and 31 ms, of 256 KiB 16 and 27 ms."""


# -- writing ------------------------------------------------------------------------------------------------
class Writable(Protocol):
    """A tensor to write, in pieces."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def pieces(self) -> Iterable[Tensor]:
        """Contiguous CPU tensors whose bytes follow each other. Called after earlier tensors are written."""


def nbytes_of(t: Writable) -> int:
    return math.prod(t.shape) * t.dtype.itemsize


def order_of(tensors: Mapping[str, Writable]) -> list[str]:
    """Names in the order of the file, in which ``pieces`` are consumed too. Tensors of the widest elements
    come first, so that each tensor is aligned to its element size, as in safetensors itself."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_tensors(
    path: str,
    tensors: Mapping[str, Writable],
    metadata: Mapping[str, str],
    progress: Progress | None = None,
    *,
    summed: bool = True,
) -> tuple[FileRecord, dict[str, str]]:
    """Write one file. Returns its record and the crc32 of each tensor as 8 hex digits."""
    order = order_of(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        t = tensors[name]
        stored, shape = as_stored(t.dtype, t.shape)
        end = at + nbytes_of(t)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    head = len(text).to_bytes(8, "little") + text
    contents = (chunks(map(bytes_of, tensors[name].pieces()), progress) for name in order)
    record, (_, *sums) = write_parts(path, chain([[head]], contents), summed=summed)
    return record, dict(zip(order, sums, strict=True))


# -- reading ------------------------------------------------------------------------------------------------
class TensorFile:
    """An open safetensors file. All reads use one descriptor: a rename after the checks changes nothing."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = open_regular(path)
        self.size = os.fstat(self._fd).st_size
        try:
            self._entries = self._header()
        except BaseException:
            self.close()
            raise
        self.sound: set[str] = set()  # names of tensors whose checksum was compared and matched
        self.metadata: dict[str, str] = self._entries.pop("__metadata__", None) or {}

    def close(self) -> None:
        os.close(self._fd)

    def _header(self) -> dict[str, Any]:
        try:
            # safetensors' own reader first: it detects every kind of damaged header
            with safe_open(self.path, "pt"):
                pass
        except (SafetensorError, OSError, RuntimeError) as e:  # RuntimeError: torch cannot map the file
            raise CheckpointError(f"{self.path} is not a whole safetensors file: {e}") from e
        head = bytearray(8)
        self.read_bytes(memoryview(head), 0)
        text = bytearray(int.from_bytes(head, "little"))
        self.read_bytes(memoryview(text), 8)
        self._data = 8 + len(text)
        header: dict[str, Any] = loads(bytes(text), self.path)
        return header

    def names(self) -> list[str]:
        return list(self._entries)

    def _entry(self, name: str) -> tuple[str, list[int], int, int]:
        if name not in self._entries:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        e = self._entries[name]
        start, end = (self._data + offset for offset in e["data_offsets"])
        if not self._data <= start <= end <= self.size:
            raise CheckpointError(f"{self.path}: {name!r} is outside of the file")
        return e["dtype"], e["shape"], start, end - start

    def tensor(self, name: str) -> FileTensor:
        """A tensor with the dtype and shape of the header."""
        stored, shape, start, size = self._entry(name)
        if stored not in DTYPES:
            raise CheckpointError(f"{self.path}: {name!r} has dtype {stored}, which is not supported")
        found = FileTensor(self, name, tuple(shape), DTYPES[stored], start)
        if found.nbytes != size:
            raise CheckpointError(f"{self.path}: {name!r} of shape {shape} takes {size} bytes")
        return found

    def recorded(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], crc32: str) -> FileTensor:
        """A tensor that a manifest describes. CheckpointError if the file disagrees with the manifest."""
        stored, there, start, size = self._entry(name)
        found = FileTensor(self, name, shape, dtype, start, crc32)
        if (stored, there) != as_stored(dtype, shape) or found.nbytes != size:
            raise CheckpointError(
                f"{self.path}: {name!r} is {stored} {there}, on record {dtype_name(dtype)} {list(shape)}"
            )
        return found

    def read_bytes(self, into: memoryview, at: int) -> None:
        done = 0
        while done < len(into):
            try:
                n = os.preadv(self._fd, [into[done:]], at + done)
            except OSError as e:
                raise CheckpointError(f"cannot read {self.path}: {e.strerror}") from e
            if n == 0:
                raise CheckpointError(f"{self.path} is truncated")
            done += n

    def mapped(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the mapped file. Its bytes are read at first use, so copy them soon."""
        skipped = at % mmap.ALLOCATIONGRANULARITY
        size = skipped + math.prod(shape) * dtype.itemsize
        if os.fstat(self._fd).st_size < at - skipped + size:  # access beyond the end would be SIGBUS
            raise CheckpointError(f"{self.path} is truncated")
        with naming("map", self.path):  # ACCESS_COPY: writable, for torch has no read-only tensors
            pages = mmap.mmap(self._fd, size, access=mmap.ACCESS_COPY, offset=at - skipped)
        return torch.frombuffer(pages, dtype=dtype, offset=skipped).view(shape)


@dataclass(frozen=True)
class FileTensor:
    """One tensor of an open file. ``crc32``: 8 hex digits, or None if no manifest records them."""

    file: TensorFile
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    crc32: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def identity(self) -> object:
        """Equal for tensors that share the same bytes of a file."""
        return self.file.path, self.start, self.nbytes

    def verify(self) -> None:
        """Compare all bytes with the checksum, in bounded memory. CheckpointError on a mismatch."""
        if self.crc32 is None or self.name in self.file.sound:
            return
        crc = 0
        buffer = memoryview(bytearray(min(CHUNK, self.nbytes)))
        for at in range(0, self.nbytes, CHUNK):
            chunk = buffer[: min(CHUNK, self.nbytes - at)]
            self.file.read_bytes(chunk, self.start + at)
            crc = zlib.crc32(chunk, crc)
        self._compare(crc)
        self.file.sound.add(self.name)

    def _compare(self, crc: int) -> None:
        found = crc32_text(crc)
        if found != self.crc32:
            raise CheckpointError(f"{self.file.path}: {self.name!r} is damaged: its crc32 is {found}, not {self.crc32}")

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        """Fill ``out``, a CPU tensor of any dtype and strides, with the region that begins at ``starts``.

        With ``check``, compares the checksum if the region is the whole tensor.
        """
        whole = tuple(out.shape) == self.shape
        shape = self.shape
        if out.ndim == 0:
            shape, starts, out = (1,), (0,), out.view(1)
        reader = _Reader(self.file, self.dtype, summing=check and whole and self.crc32 is not None)
        if out.numel():
            reader.region(self.start, shape, starts, out.detach())
        if reader.summing:
            self._compare(reader.crc)


class _Reader:
    """One read. It visits the bytes in file order, so that it can compute their crc32 on the way."""

    def __init__(self, file: TensorFile, dtype: torch.dtype, summing: bool) -> None:
        self._file, self._dtype, self.summing = file, dtype, summing
        self.crc = 0

    def region(self, at: int, shape: tuple[int, ...], starts: Sequence[int], out: Tensor) -> None:
        """Read the region at ``starts`` of a tensor of ``shape`` that begins at byte ``at`` of the file."""
        row = math.prod(shape[1:]) * self._dtype.itemsize
        wanted = out[0].numel() * self._dtype.itemsize
        at += starts[0] * row
        if row <= CHUNK and (wanted == row or wanted < RUN):
            self._rows(at, shape[1:], starts[1:], out)
        elif wanted == row and self._fits(out):
            self._bytes(at, out)
        elif out.shape[2:] == shape[2:] and self._fits(out):
            self._runs(at + starts[1] * row // shape[1], row, out)
        else:
            for i in range(out.shape[0]):
                self.region(at + i * row, shape[1:], starts[1:], out[i])

    def _runs(self, at: int, apart: int, out: Tensor) -> None:
        """Read one run of bytes per row of ``out``. Runs start ``apart`` bytes apart in the file."""
        data, run = bytes_of(out), out[0].numel() * self._dtype.itemsize
        for i in range(out.shape[0]):
            self._file.read_bytes(data[i * run : (i + 1) * run], at + i * apart)

    def _fits(self, out: Tensor) -> bool:
        """Whether the bytes of the file can be read straight into ``out``."""
        return out.is_contiguous() and out.dtype == self._dtype

    def _rows(self, at: int, row: tuple[int, ...], starts: Sequence[int], out: Tensor) -> None:
        """Read consecutive rows of shape ``row`` from byte ``at``. ``out`` takes all or part of each."""
        if tuple(out.shape[1:]) == row and self._fits(out):
            self._bytes(at, out)
            return
        size = math.prod(row) * self._dtype.itemsize
        step = CHUNK // size
        staged = None
        for i in range(0, out.shape[0], step):
            band = out[i : i + step]
            if self.summing or at % self._dtype.itemsize:
                if staged is None:
                    staged = torch.empty((min(step, out.shape[0]), *row), dtype=self._dtype)
                rows = staged[: band.shape[0]]
                self._bytes(at + i * size, rows)
            else:
                rows = self._file.mapped(at + i * size, (band.shape[0], *row), self._dtype)
            for dim, start in enumerate(starts, 1):
                rows = rows.narrow(dim, start, out.shape[dim])
            band.copy_(rows)

    def _bytes(self, at: int, out: Tensor) -> None:
        data = bytes_of(out)
        for i in range(0, len(data), CHUNK):
            chunk = data[i : i + CHUNK]
            self._file.read_bytes(chunk, at + i)
            if self.summing:
                self.crc = zlib.crc32(chunk, self.crc)
