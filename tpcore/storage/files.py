"""Files on the disk and not only in its cache, and errors that name them."""

from __future__ import annotations

import ctypes
import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ..errors import CheckpointError
from .crc32 import joined, spelled
from .jsonfile import FileRecord
from .progress import Tick, nothing

CHUNK = 8 << 20
"""Bytes handled at once: written, summed or read on the way to another dtype or layout."""
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


def chunks(pieces: Iterable[Bytes], tick: Tick = nothing) -> Iterator[Bytes]:
    """The same in steps; ``tick`` is called once the bytes of one are done with."""
    for piece in pieces:
        for i in range(0, len(piece), CHUNK):
            chunk = piece[i : i + CHUNK]
            yield chunk
            tick(len(chunk))


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


def read_file(path: str) -> bytes:
    with naming("read", path), open(path, "rb") as f:
        return f.read()


def crc32_of(path: str, tick: Tick = nothing) -> str:
    """Of a whole file."""
    crc = 0
    with naming("read", path), open(path, "rb") as f:
        while chunk := f.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
            tick(len(chunk))
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
