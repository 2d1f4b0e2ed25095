"""Durable files: their bytes, checksums, progress and JSON, and errors that name the file."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import platform
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from ...extras import module_spec
from ...log import on_terminal
from ...settings import __version__


class Progress:
    """Counts bytes. ``show(done, total)`` is called at the start and after each step."""

    def __init__(self, show: Callable[[int, int], object] | None) -> None:
        self._show, self._done, self._total = show, 0, 0

    def start(self, total: int) -> None:
        self._total = total
        self.add(0)

    def add(self, step: int) -> None:
        self._done += step
        if self._show is not None:
            self._show(self._done, self._total)


SILENT = Progress(None)


@contextmanager
def bar(title: str, total: Callable[[], int], *, shown: bool) -> Iterator[Progress]:
    """Progress of ``total()`` bytes as a tqdm bar. Silent unless ``shown``, and without tqdm or a terminal."""
    if not (shown and on_terminal() and module_spec("tqdm") and total()):
        yield SILENT
        return
    from tqdm import tqdm

    with tqdm(desc=title, total=total(), unit="B", unit_scale=True, leave=False, dynamic_ncols=True) as bar:
        yield Progress(lambda done, _: bar.update(done - bar.n))


MANIFEST = "manifest.json"
PREFIX = "tp_rank_"
_SHOWN = 8
CHUNK = 8 << 20
"""Bytes per step when writing, computing a checksum, or converting to another dtype or layout."""
LARGEST = 256 << 20
"""Upper limit in bytes for a manifest, a state or an index. A manifest of 10,000 tensors takes 2 MB."""
# Bytes between two calls that start writeback. Two ranks on two cores, each with checksums and 0.4 GB to
# write; time relative to plain write and fsync: 1.29 without early writeback, 0.98 every 64 MiB, 1.46 every
# 256 MiB; 1.08 with posix_fadvise; 1.5 with checksums in a thread.
_EARLY = 64 << 20
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # libc's; None outside of Linux
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of <fcntl.h>
CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of a file system that lacks an operation."""


@contextmanager
def naming(doing: str, path: str) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"cannot {doing} {path}: {e.strerror or e}") from e


MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, RecursionError)
"""What code for well-formed JSON raises for other JSON."""


@contextmanager
def damage(what: str) -> Iterator[None]:
    """Turn the errors of malformed JSON in the block into a CheckpointError that names ``what``."""
    try:
        yield
    except MALFORMED as e:
        raise CheckpointError(f"{what} is damaged: {type(e).__name__}: {e}") from e


def listed(title: str, lines: list[str]) -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n  ".join([f"{title}:", *lines[:_SHOWN], *more])


def written_by() -> dict[str, str]:
    return {"tpcore": __version__, "torch": torch.__version__, "python": platform.python_version()}


Bytes = bytes | memoryview


class FileRecord(NamedTuple):
    size: int
    crc32: str


def write_file(path: str, pieces: Iterable[Bytes]) -> FileRecord:
    """Write a new durable file of these bytes, with the mode that the umask gives."""
    return write_parts(path, [chunks(pieces)])[0]


def write_parts(path: str, parts: Iterable[Iterable[Bytes]], *, summed: bool = True) -> tuple[FileRecord, list[str]]:
    """Like ``write_file``, of several parts, each in chunks. Returns its record and each part's crc32; unsummed that of
    no bytes."""
    sums: list[tuple[int, int]] = []
    done = begun = 0
    with naming("write", path), open(path, "xb") as f:
        for part in parts:
            crc, size = 0, 0
            for chunk in part:
                if summed:
                    crc = zlib.crc32(chunk, crc)
                f.write(chunk)
                size += len(chunk)
                begun = _start_writeback(f.fileno(), begun, done + size)
            sums.append((crc, size))
            done += size
        f.flush()
        os.fsync(f.fileno())
    return FileRecord(done, crc32_text(combined_crc32(sums))), [crc32_text(crc) for crc, _ in sums]


def chunks(pieces: Iterable[Bytes], progress: Progress = SILENT) -> Iterator[Bytes]:
    """The pieces in chunks of at most ``CHUNK`` bytes. ``progress`` counts each after the caller is done."""
    for piece in pieces:
        for i in range(0, len(piece), CHUNK):
            chunk = piece[i : i + CHUNK]
            yield chunk
            progress.add(len(chunk))


def _start_writeback(fd: int, begun: int, done: int) -> int:
    """Start writeback every ``_EARLY`` bytes, so that fsync has little left to do. Returns how far it has started."""
    if done - begun < _EARLY or _SYNC_FILE_RANGE is None:
        return begun
    # only a hint: errors are harmless
    _SYNC_FILE_RANGE(fd, ctypes.c_int64(begun), ctypes.c_int64(done - begun), _WRITE)
    return done


def open_regular(path: str) -> int:
    """Open a file for reading. CheckpointError for a pipe or a device, which could block or never end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise CheckpointError(f"cannot open {path}: {e.strerror or e}") from e
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise CheckpointError(f"{path} is not a regular file")


def read_file(path: str) -> bytes:
    """All bytes of a manifest, state or index. CheckpointError above ``LARGEST`` bytes."""
    with naming("read", path), open(open_regular(path), "rb") as f:
        size = os.fstat(f.fileno()).st_size
        if size > LARGEST:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, more than the limit of {LARGEST}")
        return f.read(LARGEST)


def crc32_of(path: str, progress: Progress = SILENT) -> str:
    """The crc32 of a whole file, as 8 hex digits."""
    crc = 0
    with naming("read", path), open(open_regular(path), "rb") as f:
        while chunk := f.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
            progress.add(len(chunk))
    return crc32_text(crc)


def sync_dir(path: str) -> None:
    """Make the entries of a directory durable."""
    with naming("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as e:
            if e.errno != errno.EINVAL:  # EINVAL: a file system whose directories cannot be synced
                raise
        finally:
            os.close(fd)


def make_dirs(path: str) -> None:
    """``os.makedirs`` whose result survives a power cut."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_dirs(parent)
    with naming("make the directory", path):
        os.mkdir(path)
    sync_dir(parent)


# -- JSON -------------------------------------------------------------------------------------------------
def dumps(value: Any, indent: int | None = None) -> bytes:
    return (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode()


def loads(data: bytes, path: str, *, halves: bool = False) -> Any:
    """Parse strict JSON, without NaN and infinity. ``halves``: strings may contain lone surrogates, as values of a
    state may. Names of files may not."""
    try:
        parsed = json.loads(data, parse_constant=_finite, parse_float=_finite)
        if not halves and b"\\u" in data:
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:  # ValueError: bad UTF-8 and bad JSON alike
        raise CheckpointError(f"{path} is damaged: {e}") from e
    return parsed


def format_of(folder: str) -> object:
    """The format that the manifest in ``folder`` names, if any. CheckpointError if it cannot be read."""
    path = os.path.join(folder, MANIFEST)
    top = loads(read_file(path), path)
    return top.get("format") if isinstance(top, dict) else None


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is not JSON")
    return value


# -- checksums: polynomials over GF(2) modulo that of crc32; bit 31 - k is the coefficient of x**k -----------
_MODULUS, _ONE = 0xEDB88320, 1 << 31


def combined_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """The crc32 of a concatenation, from the (crc32, size in bytes) of each part: zlib's crc32_combine."""
    total = 0
    for crc, size in parts:
        total = _multiplied(_power_of_x(8 * size), total) ^ crc
    return total


@lru_cache(maxsize=1024)  # a model has many tensors, but few different sizes
def _power_of_x(n: int) -> int:
    if n == 0:
        return _ONE
    root = _power_of_x(n // 2)
    square = _multiplied(root, root)
    return _multiplied(square, _ONE >> 1) if n % 2 else square


def _multiplied(a: int, b: int) -> int:
    out = 0
    while a:
        if a & _ONE:
            out ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_MODULUS if b & 1 else 0)
    return out


crc32_text = "{:08x}".format
"""A crc32 as it is written: 8 hex digits."""
