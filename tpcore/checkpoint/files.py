"""Files on the disk and not only in its cache, and errors that name them."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Thread

from ..errors import CheckpointError
from .manifest import FileRecord


@contextmanager
def naming(doing: str, path: str) -> Iterator[None]:
    """Turn what the system reports about ``path`` into an error that names it."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"cannot {doing} {path}: {e.strerror or e}") from e


def write_file(path: str, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """A new file of these bytes, durable, with the mode that the umask says."""
    size = 0
    with naming("write", path), open(path, "xb") as f, _Hasher() as hasher:
        for chunk in chunks:
            hasher.chunks.put(chunk)
            f.write(chunk)
            size += len(chunk)
        f.flush()
        os.fsync(f.fileno())
    return FileRecord(size, hasher.digest.hexdigest())


class _Hasher:
    """Sums beside the write, which takes about as long. Chunks may not change before the block ends.

    A thread of its own, because executors take no work any more while the program ends.
    """

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.chunks: Queue[bytes | memoryview | None] = Queue(1)
        self._thread = Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while (chunk := self.chunks.get()) is not None:
            self.digest.update(chunk)

    def __enter__(self) -> _Hasher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.chunks.put(None)
        self._thread.join()


def read_file(path: str) -> bytes:
    with naming("read", path), open(path, "rb") as f:
        return f.read()


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
