"""Atomic directories: a directory appears under its name whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from ..errors import CheckpointError
from .files import MANIFEST, PREFIX, loads, make_dirs, naming, read_file, sync_dir

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h> and <linux/fs.h>
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


def _sibling(target: str, kind: str) -> str:
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{name}.{kind}")


def staging_path(target: str, save_id: str) -> str:
    return _sibling(target, f"saving-{save_id}")


def _siblings(target: str, kind: str) -> list[str]:
    """The paths ``.name.kind-*`` in the parent directory of ``target``."""
    parent, prefix = os.path.dirname(target), os.path.basename(_sibling(target, kind)) + "-"
    names = os.listdir(parent) if os.path.isdir(parent) else []
    return [os.path.join(parent, name) for name in sorted(names) if name.startswith(prefix)]


def replaced_names(parent: str) -> list[str]:
    """Names in ``parent`` of which a save moved the previous checkpoint away: see ``resolve``."""
    names = [name.rpartition(".replaced-") for name in os.listdir(parent)]
    return [before[1:] for before, found, _ in names if found and before.startswith(".")]


def resolve(target: str) -> str:
    """The directory that holds the checkpoint ``target``: ``target`` itself, except after one kind of crash.

    On a file system that cannot swap two names in one step, a save may die between two renames: the previous
    checkpoint is moved away, and the new one is not yet moved in. The new one is complete by then, and its
    staging directory is returned.
    """
    if not os.path.lexists(target):
        for replaced in _siblings(target, "replaced"):
            new = staging_path(target, replaced.rpartition("-")[2])
            if os.path.isfile(os.path.join(new, MANIFEST)):
                return new
    return target


class Staging:
    """The directory that a save writes to, next to ``target``, until ``commit`` renames it. For one job.

    ``format``: the format of the new manifest. A directory of another format is not replaced. ``also``: names
    that the directory may hold in addition to the manifest and the directories of ranks.
    """

    def __init__(self, target: str, save_id: str, format: str, also: Collection[str] = ()) -> None:
        self.target = target
        self.path = staging_path(target, save_id)
        self._old = _sibling(target, f"replaced-{save_id}")
        make_dirs(os.path.dirname(target))
        self._lock = _lock(target)
        try:
            _clean_up(target)
            _clean_up_abandoned(target)
            _refuse_other_files(target, format, also)
            with naming("make the directory", self.path):
                os.mkdir(self.path)
        except BaseException:
            self.close()
            raise

    def commit(self) -> None:
        """Replace ``target`` by the new directory. Readers of the name never see a partial one."""
        with naming("put in place", self.target):
            if not os.path.lexists(self.target) or not os.listdir(self.target):
                os.rename(self.path, self.target)
            elif not _exchange(self.path, self.target):
                os.rename(self.target, self._old)
                os.rename(self.path, self.target)
        sync_dir(os.path.dirname(self.target))

    def close(self) -> None:
        """Remove leftovers and the lock: after ``commit`` the previous directory, otherwise the new one."""
        try:
            if os.path.lexists(self._old) and not os.path.lexists(self.target):
                os.rename(self._old, self.target)  # the second rename of two failed
            # leftovers are harmless, and the next save tries to remove them again
            shutil.rmtree(self.path, ignore_errors=True)
            shutil.rmtree(self._old, ignore_errors=True)
        finally:
            _unlock(self._lock)
            self._lock = None


@contextmanager
def new_beside(target: str) -> Iterator[str]:
    """A path to write at, until it is renamed ``target``. Nothing is left there after the block, nor of
    processes that were killed in it. CheckpointError if another one is in it."""
    make_dirs(os.path.dirname(target))
    lock = _lock(target)
    path = _sibling(target, f"writing-{uuid.uuid4().hex}")
    try:
        for left in _siblings(target, "writing") if lock is not None else ():
            _remove(left)
        yield path
    finally:
        _remove(path)
        _unlock(lock)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)


def _clean_up(target: str) -> None:
    """Finish or remove what saves to ``target`` that were killed have left. Its lock is held."""
    found = resolve(target)
    if found != target:
        with naming("rename", found):
            os.rename(found, target)
        sync_dir(os.path.dirname(target))
    for left in (*_siblings(target, "saving"), *_siblings(target, "replaced")):
        shutil.rmtree(left, ignore_errors=True)


def _clean_up_abandoned(target: str) -> None:
    """The same for names that differ from ``target`` in the number at the end: a job that goes on after it
    was killed may never save to those again."""
    parent, name = os.path.split(target)
    stem = re.escape(name.rstrip("0123456789"))
    pattern = re.compile(rf"\.({stem}\d+)\.(lock$|saving-|replaced-)")
    found = {match[1] for other in os.listdir(parent) if (match := pattern.match(other))}
    for other in sorted(found - {name}):
        with suppress(CheckpointError):  # of a job that saves there at this moment
            lock = _lock(os.path.join(parent, other))
            if lock is not None:
                try:
                    _clean_up(os.path.join(parent, other))
                finally:
                    _unlock(lock)


def _refuse_other_files(target: str, format: str, also: Collection[str]) -> None:
    """CheckpointError if ``target`` holds files that are not from a checkpoint: saving would remove them."""
    if not os.path.lexists(target):
        return
    with naming("list", target):
        names = sorted(os.listdir(target))
    if MANIFEST in names:
        _refuse_other_format(target, format)
        names = [name for name in names if name not in (MANIFEST, *also) and not name.startswith(PREFIX)]
    if names:
        raise CheckpointError(
            f"cannot save to {target}: saving would replace the directory, and it holds {names[0]!r}"
            + (f" and {len(names) - 1} more" if names[1:] else "")
            + ", not from a checkpoint of this format; give another name, or a new directory inside it"
        )


def _refuse_other_format(target: str, format: str) -> None:
    path = os.path.join(target, MANIFEST)
    try:
        top = loads(read_file(path), path)
    except CheckpointError as e:
        raise CheckpointError(f"cannot save to {target}: {e}; give another name, or remove it") from e
    found = top.get("format") if isinstance(top, dict) else None
    if found != format:
        raise CheckpointError(
            f"cannot save to {target}: {path} is of the format {found!r}, and saving would replace the "
            f"directory by one of the format {format!r}: give another name"
        )


def _exchange(a: str, b: str) -> bool:
    """Swap two names in one step. False if the file system cannot (NFS, for example)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code))


def _unlock(lock: IO[bytes] | None) -> None:
    if lock is not None:
        with lock, suppress(OSError):
            os.unlink(lock.name)


def _lock(target: str) -> IO[bytes] | None:
    """A locked file next to ``target``, which one job can hold. None if the file system has no locks."""
    path = _sibling(target, "lock")
    with naming("lock", path):
        while True:
            f = open(path, "ab")  # noqa: SIM115  open until the save is over
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.lexists(path) and os.path.samestat(os.fstat(f.fileno()), os.stat(path)):
                    return f
                f.close()  # the previous holder unlinked this file before we locked it: open the name anew
            except BlockingIOError:
                f.close()
                raise CheckpointError(f"another job is saving to {target} at this moment") from None
            except OSError as e:
                f.close()
                if e.errno in _CANNOT:
                    return None
                raise
