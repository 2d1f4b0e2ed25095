"""Files on the disk and not only in its cache, and errors that name them."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Thread

from ..errors import CheckpointError
from .manifest import FileRecord
from .progress import Tick, nothing
from .sums import joined, spelled

CHUNK = 8 << 20
"""Bytes handled at once: written, summed or read on the way to another dtype or layout."""
_WAITING = 8  # chunks that are written and not yet summed
_EARLY = 64 << 20  # written in steps of 8 MiB and 64 MiB, 1 GB took 0.99 and 0.60 of plain write and fsync


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

    Each part comes in pieces, which may not change before the file is written. ``summed=False``: all sums
    are of nothing.
    """
    sizes: list[int] = []
    done = begun = 0
    with naming("write", path), open(path, "xb") as f, _Summing() as summing:
        for part in parts:
            sizes.append(0)
            summing.crcs.append(0)
            for chunk in chunks(part):
                if summed:
                    summing.add(chunk)
                f.write(chunk)
                sizes[-1] += len(chunk)
                done += len(chunk)
                begun = _begin(f.fileno(), begun, done)
        f.flush()
        os.fsync(f.fileno())
    total = joined(zip(summing.crcs, sizes, strict=True))
    return FileRecord(done, spelled(total)), [spelled(crc) for crc in summing.crcs]


def chunks(pieces: Iterable[Bytes], tick: Tick = nothing) -> Iterator[Bytes]:
    """The same in steps; ``tick`` is called once the bytes of one are done with."""
    for piece in pieces:
        for i in range(0, len(piece), CHUNK):
            chunk = piece[i : i + CHUNK]
            yield chunk
            tick(len(chunk))


def _begin(fd: int, begun: int, done: int) -> int:
    """Have the disk begin with what is written, every now and then, so that fsync has little to wait for."""
    if done - begun < _EARLY or not hasattr(os, "posix_fadvise"):
        return begun
    os.posix_fadvise(fd, begun, done - begun, os.POSIX_FADV_DONTNEED)
    return done


class _Summing:
    """Sums beside the write, in a thread of its own: executors take no work any more while a program ends."""

    def __init__(self) -> None:
        self.crcs: list[int] = []
        self._queue: Queue[tuple[int, Bytes] | None] = Queue(_WAITING)
        self._thread = Thread(target=self._run, daemon=True)

    def add(self, chunk: Bytes) -> None:
        """To the last of ``crcs``."""
        self._queue.put((len(self.crcs) - 1, chunk))

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            part, chunk = task
            self.crcs[part] = zlib.crc32(chunk, self.crcs[part])

    def __enter__(self) -> _Summing:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.put(None)
        self._thread.join()


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
