"""Files on the disk and not only in its cache: their bytes, checksums and JSON, and errors that name them."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple, NoReturn

from ..errors import CheckpointError
from .progress import Progress

MANIFEST = "manifest.json"
PREFIX = "tp_rank_"
_DEEPEST = 400  # a state is 100 deep at most, and each of its dicts is up to three levels of JSON
CHUNK = 8 << 20
"""Bytes handled at once: written, summed or read on the way to another dtype or layout."""
LARGEST = 256 << 20
"""Bytes of a manifest, a state or an index: one of 10,000 tensors takes 2 MB."""
# Two ranks on two cores, each summing and writing 0.4 GB, against plain write and fsync: 1.29 without, 0.98
# with a start every 64 MiB, 1.46 with one every 256 MiB; 1.08 by posix_fadvise; 1.5 with sums in a thread.
_EARLY = 64 << 20
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of <fcntl.h>


@contextmanager
def naming(doing: str, path: str) -> Iterator[None]:
    """Turn what the system reports about ``path`` into an error that names it."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"cannot {doing} {path}: {e.strerror or e}") from e


Bytes = bytes | memoryview


class FileRecord(NamedTuple):
    size: int
    crc32: str  # 8 hex digits


def write_file(path: str, pieces: Iterable[Bytes]) -> FileRecord:
    """A new file of these bytes, durable, with the mode that the umask says."""
    return write_parts(path, [pieces])[0]


def write_parts(
    path: str, parts: Iterable[Iterable[Bytes]], *, summed: bool = True
) -> tuple[FileRecord, list[str]]:
    """As ``write_file``; the file's record, and the crc32 of each part.

    Each part comes in pieces. ``summed=False``: all sums are of nothing.
    """
    sums: list[tuple[int, int]] = []
    done = begun = 0
    with naming("write", path), open(path, "xb") as f:
        for part in parts:
            crc, size = 0, 0
            for chunk in chunks(part):
                if summed:
                    crc = zlib.crc32(chunk, crc)
                f.write(chunk)
                size += len(chunk)
                begun = _begin(f.fileno(), begun, done + size)
            sums.append((crc, size))
            done += size
        f.flush()
        os.fsync(f.fileno())
    return FileRecord(done, spelled(joined(sums))), [spelled(crc) for crc, _ in sums]


def chunks(pieces: Iterable[Bytes], progress: Progress | None = None) -> Iterator[Bytes]:
    """The same in steps; ``progress`` takes the bytes of one once they are done with."""
    for piece in pieces:
        for i in range(0, len(piece), CHUNK):
            chunk = piece[i : i + CHUNK]
            yield chunk
            if progress is not None:
                progress.add(len(chunk))


def _begin(fd: int, begun: int, done: int) -> int:
    """Have the disk begin with what is written, every now and then, so that fsync has little to wait for."""
    start = _sync_file_range()
    if done - begun < _EARLY or start is None:
        return begun
    start(fd, ctypes.c_int64(begun), ctypes.c_int64(done - begun), _WRITE)  # advice: nothing hangs on it
    return done


@cache
def _sync_file_range() -> Any:
    """Linux alone has it. posix_fadvise(DONTNEED) begins too, but looks at every page in the cache."""
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def open_regular(path: str) -> int:
    """A descriptor to read from. CheckpointError for a pipe or a device, which would wait or have no end."""
    with naming("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise CheckpointError(f"{path} is no regular file")


def read_file(path: str) -> bytes:
    """The whole of a file that describes others. CheckpointError where it is too large for that."""
    with naming("read", path), open(open_regular(path), "rb") as f:
        size = os.fstat(f.fileno()).st_size
        if size > LARGEST:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes, and none is larger than {LARGEST}"
            )
        return f.read(LARGEST)


def crc32_of(path: str, progress: Progress | None = None) -> str:
    """Of a whole file."""
    crc = 0
    with naming("read", path), open(open_regular(path), "rb") as f:
        while chunk := f.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
            if progress is not None:
                progress.add(len(chunk))
    return spelled(crc)


def sync_dir(path: str) -> None:
    """Make the names in a directory durable."""
    with naming("sync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as e:
            if e.errno != errno.EINVAL:  # a file system on which directories need no syncing
                raise
        finally:
            os.close(fd)


def make_dirs(path: str) -> None:
    """``os.makedirs`` whose result outlives a power cut."""
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
    """Strict JSON: no NaN, no infinity, not nested deeper than ``_DEEPEST``.

    ``halves``: strings may have halves of characters, as the values of a state may and no name of a file.
    """

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    def finite(word: str) -> float:
        value = float(word)
        return value if math.isfinite(value) else refuse(word)

    try:
        found = json.loads(data, parse_constant=refuse, parse_float=finite)
        if not halves and b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:  # ValueError: bad UTF-8 and bad JSON alike
        raise CheckpointError(f"{path} is damaged: {e}") from e
    if _deeper(found, _DEEPEST):
        raise CheckpointError(f"{path} is damaged: it is nested more than {_DEEPEST} deep")
    return found


def _deeper(value: Any, limit: int) -> bool:
    """Level by level, and not by recursion, which has a limit of its own."""
    level = [value]
    for _ in range(limit):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


# -- checksums --------------------------------------------------------------------------------------------
# Polynomials over GF(2) modulo the one of crc32, the coefficient of x**k in bit 31 - k; zlib's crc32_combine
# (crc32.c) is the source of the algorithm.
_MODULUS, _ONE, _X8 = 0xEDB88320, 1 << 31, 1 << 23


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """crc32 of the concatenation of parts, of each of which (crc32, bytes) is given."""
    total = 0
    for crc, size in parts:
        total = _times(_shift(size), total) ^ crc
    return total


def spelled(crc: int) -> str:
    """As it goes on record."""
    return f"{crc:08x}"


@lru_cache(maxsize=256)  # a model has many tensors of few sizes
def _shift(size: int) -> int:
    """x ** (8 size)"""
    out, base = _ONE, _X8
    while size:
        if size & 1:
            out = _times(out, base)
        base = _times(base, base)
        size >>= 1
    return out


def _times(a: int, b: int) -> int:
    out = 0
    while a:
        if a & _ONE:
            out ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_MODULUS if b & 1 else 0)
    return out
