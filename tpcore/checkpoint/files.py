"""Files on the disk and not only in its cache, and errors that name them."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

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
    digest = hashlib.sha256()
    size = 0
    pending: Future[None] | None = None
    with naming("write", path), open(path, "xb") as f, ThreadPoolExecutor(1) as hasher:
        for chunk in chunks:
            if pending is not None:
                pending.result()
            pending = hasher.submit(digest.update, chunk)  # beside the write: it takes about as long
            f.write(chunk)
            size += len(chunk)
        if pending is not None:
            pending.result()
        f.flush()
        os.fsync(f.fileno())
    return FileRecord(size, digest.hexdigest())


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
