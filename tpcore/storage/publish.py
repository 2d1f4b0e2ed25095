"""Atomic directories: a directory appears under its name whole or not at all."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from ..errors import CheckpointError
from .contents import link_in, owned, refuse_other_files, remove_owned
from .files import MANIFEST, make_dirs, naming, sync_dir
from .siblings import CANNOT, lock, resolve, sibling, siblings, staging_path, unlock

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h> and <linux/fs.h>


class Staging:
    """The directory that a save writes to, next to ``target``, until ``commit`` renames it. For one job.

    ``format``: the format of the new manifest. A directory of another format is not replaced. ``also``: names
    that the directory may hold in addition to the manifest and the directories of ranks. ``others_stay``:
    ``target`` may hold other files, such as logs, which are left as they are; otherwise they are a
    CheckpointError.
    """

    def __init__(
        self,
        target: str,
        save_id: str,
        format: str,
        also: Collection[str] = (),
        *,
        others_stay: bool = False,
    ) -> None:
        self.target, self._also, self._linking = target, also, False
        self.path = staging_path(target, save_id)
        self._old = sibling(target, f"replaced-{save_id}")
        make_dirs(os.path.dirname(target))
        self._lock = lock(target)
        try:
            _clean_up(target, also)
            _clean_up_abandoned(target, also)
            refuse_other_files(target, format, also, others_stay)
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
            elif len(owned(self.target, self._also)) < len(os.listdir(self.target)):
                self._exchange_inside()
            elif not _exchange(self.path, self.target):
                os.rename(self.target, self._old)
                os.rename(self.path, self.target)
        sync_dir(os.path.dirname(self.target))

    def _exchange_inside(self) -> None:
        """Exchange the checkpoint in a directory that stays, since other files are in it.

        The previous manifest leaves first and the new one comes last. In between ``resolve`` finds the new
        checkpoint where it was written: its files are linked into the directory and not moved.
        """
        os.mkdir(self._old)
        for name in reversed(owned(self.target, self._also)):
            os.rename(os.path.join(self.target, name), os.path.join(self._old, name))
        self._linking = True
        link_in(self.path, self.target, self._also)

    def _restore(self) -> None:
        """Undo a ``commit`` that failed after it had moved the previous checkpoint away."""
        if not os.path.lexists(self.target):
            os.rename(self._old, self.target)
        elif not os.path.lexists(os.path.join(self.target, MANIFEST)):
            if self._linking:  # else what is there is of the previous one
                remove_owned(self.target, self._also)
            for name in owned(self._old, self._also):
                os.rename(os.path.join(self._old, name), os.path.join(self.target, name))

    def close(self) -> None:
        """Remove leftovers and the lock: after ``commit`` the previous directory, otherwise the new one."""
        try:
            if os.path.lexists(self._old):
                self._restore()
            # leftovers are harmless, and the next save tries to remove them again
            shutil.rmtree(self.path, ignore_errors=True)
            shutil.rmtree(self._old, ignore_errors=True)
        finally:
            unlock(self._lock)
            self._lock = None


@contextmanager
def new_beside(target: str) -> Iterator[str]:
    """A path to write at, until it is renamed ``target``. Nothing is left there after the block, nor of
    processes that were killed in it. CheckpointError if another one is in it."""
    make_dirs(os.path.dirname(target))
    held = lock(target)
    path = sibling(target, f"writing-{uuid.uuid4().hex}")
    try:
        for left in siblings(target, "writing") if held is not None else ():
            _remove(left)
        yield path
    finally:
        _remove(path)
        unlock(held)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)


def _clean_up(target: str, also: Collection[str]) -> None:
    """Finish or remove what saves to ``target`` that were killed have left. Its lock is held."""
    found = resolve(target)
    if found != target:
        with naming("put in place", found):
            if os.path.lexists(target):
                link_in(found, target, also)
            else:
                os.rename(found, target)
        sync_dir(os.path.dirname(target))
    for left in (*siblings(target, "saving"), *siblings(target, "replaced")):
        shutil.rmtree(left, ignore_errors=True)


def _clean_up_abandoned(target: str, also: Collection[str]) -> None:
    """The same for names that differ from ``target`` in the number at the end: a job that goes on after it
    was killed may never save to those again."""
    parent, name = os.path.split(target)
    stem = re.escape(name.rstrip("0123456789"))
    pattern = re.compile(rf"\.({stem}\d+)\.(lock$|saving-|replaced-)")
    found = {match[1] for other in os.listdir(parent) if (match := pattern.match(other))}
    for other in sorted(found - {name}):
        with suppress(CheckpointError):  # of a job that saves there at this moment
            held = lock(os.path.join(parent, other))
            if held is not None:
                try:
                    _clean_up(os.path.join(parent, other), also)
                finally:
                    unlock(held)


def _exchange(a: str, b: str) -> bool:
    """Swap two names in one step. False if the file system cannot (NFS, for example)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in CANNOT:
        return False
    raise OSError(code, os.strerror(code))
