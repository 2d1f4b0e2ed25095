"""Directories that appear whole or not at all, and temporary ones that no killed process leaves for long."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO

from ...errors import CheckpointError
from .files import CANNOT, MANIFEST, PREFIX, format_of, make_dirs, naming, sync_dir

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h> and <linux/fs.h>
_CANNOT_LINK = {*CANNOT, errno.EPERM, errno.EMLINK, errno.EXDEV}


# -- names next to the directory, and the lock that one job can hold on it --------------------------------
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


def resolve(target: str) -> str:
    """The directory that holds the checkpoint ``target``: ``target`` itself, except after one kind of crash.

    Where two names cannot be swapped in one step, and in a directory that holds other files, a save may die after the
    previous checkpoint is moved away. The new one is complete by then, and its staging directory is returned.
    """
    if not os.path.lexists(os.path.join(target, MANIFEST)):
        for replaced in _siblings(target, "replaced"):
            new = staging_path(target, replaced.rpartition("-")[2])
            if os.path.isfile(os.path.join(new, MANIFEST)):
                return new
    return target


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
                if e.errno in CANNOT:
                    return None
                raise


# -- what a checkpoint owns in a directory, which may hold other files too ---------------------------------
def _owned(folder: str, also: Collection[str]) -> list[str]:
    """What a checkpoint has put into ``folder``, its manifest last. ``also``: names besides those of ranks."""
    names = [n for n in os.listdir(folder) if n == MANIFEST or n in also or n.startswith(PREFIX)]
    return sorted(names, key=lambda name: (name == MANIFEST, name))


def _remove_owned(folder: str, also: Collection[str]) -> None:
    for name in reversed(_owned(folder, also)):
        path = os.path.join(folder, name)
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def _link_in(source: str, target: str, also: Collection[str]) -> None:
    """Replace the checkpoint in ``target`` by links to the files of ``source``, its manifest last."""
    _remove_owned(target, also)
    for name in _owned(source, also):
        link(os.path.join(source, name), os.path.join(target, name))
        sync_dir(target)


def link(source: str, target: str) -> None:
    """Hard links to all files of ``source``; copies on a file system without hard links."""
    if os.path.isdir(source):
        shutil.copytree(source, target, copy_function=link)
        for folder, _, _ in os.walk(target, topdown=False):
            sync_dir(folder)
        return
    try:
        os.link(source, target)
    except OSError as e:
        if e.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, target)
        with open(target, "rb") as f:
            os.fsync(f.fileno())


def _refuse_inside(target: str) -> None:
    for here in (Path(target), *Path(target).parents):
        if here.name.startswith(PREFIX) and os.path.lexists(here.parent / MANIFEST):
            raise CheckpointError(
                f"cannot save to {target}: it is inside of the checkpoint {here.parent}, in its {here.name}, which the "
                "next save there replaces; give a directory outside of it"
            )


def _refuse_other_files(target: str, format: str, also: Collection[str], others_stay: bool) -> None:
    """CheckpointError if saving would remove files of ``target`` that are not from a checkpoint of ``format``."""
    if not os.path.lexists(target):
        return
    with naming("list", target):
        names, owned = sorted(os.listdir(target)), sorted(_owned(target, also))
    wrong = [] if others_stay else [name for name in names if name not in owned]
    if MANIFEST not in names:
        wrong += owned
    else:
        try:
            written = format_of(target)
        except CheckpointError as e:
            raise CheckpointError(f"cannot save to {target}: {e}; give another name, or remove it") from e
        if written != format:
            raise CheckpointError(
                f"cannot save to {target}: {os.path.join(target, MANIFEST)} is of the format {written!r}, and saving "
                f"would replace the directory by one of the format {format!r}: give another name"
            )
    if wrong:
        raise CheckpointError(
            f"cannot save to {target}: saving would replace the directory, and it holds {wrong[0]!r}"
            + (f" and {len(wrong) - 1} more" if wrong[1:] else "")
            + ", not from a checkpoint of this format; give another name, or a new directory inside it"
        )


# -- the directory ----------------------------------------------------------------------------------------
class Staging:
    """The directory that a save writes to, next to ``target``, until ``commit`` renames it. For one job.

    ``format``: the format of the new manifest. A directory of another format is not replaced. ``also``: names that the
    directory may hold in addition to the manifest and the directories of ranks. ``others_stay``: ``target`` may hold
    other files, such as logs, which are left as they are; otherwise they are a CheckpointError.
    """

    def __init__(
        self, target: str, save_id: str, format: str, also: Collection[str] = (), *, others_stay: bool = False
    ) -> None:
        self.target, self._also, self._linking = target, also, False
        self.path = staging_path(target, save_id)
        self._old = _sibling(target, f"replaced-{save_id}")
        _refuse_inside(target)
        make_dirs(os.path.dirname(target))
        self._lock = _lock(target)
        try:
            _clean_up(target, also)
            _clean_up_abandoned(target, also)
            _refuse_other_files(target, format, also, others_stay)
            with naming("make the directory", self.path):
                os.mkdir(self.path)
        except BaseException:
            self.close()
            raise

    def commit(self) -> None:
        """Replace ``target`` by the new directory. Readers of the name never see a partial one."""
        with naming("put in place", self.target):
            there = os.listdir(self.target) if os.path.lexists(self.target) else []
            if not there:
                os.rename(self.path, self.target)
            elif len(_owned(self.target, self._also)) < len(there) or not _exchange(self.path, self.target):
                self._exchange_inside()
        sync_dir(os.path.dirname(self.target))

    def _exchange_inside(self) -> None:
        """Exchange the checkpoint in a directory that stays: other files are in it, or names cannot be swapped. The
        previous manifest leaves first and the new one comes last; in between ``resolve`` finds the new checkpoint
        where it was written."""
        os.mkdir(self._old)
        for name in reversed(_owned(self.target, self._also)):
            os.rename(os.path.join(self.target, name), os.path.join(self._old, name))
        self._linking = True
        _link_in(self.path, self.target, self._also)

    def _restore(self) -> None:
        """Undo a ``commit`` that failed after it had moved the previous manifest away."""
        if not os.path.lexists(os.path.join(self.target, MANIFEST)):
            if self._linking:  # otherwise the files there are those of the previous one
                _remove_owned(self.target, self._also)
            for name in _owned(self._old, self._also):
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
            _unlock(self._lock)
            self._lock = None


def _clean_up(target: str, also: Collection[str]) -> None:
    """Finish or remove what killed saves to ``target`` have left. The caller holds its lock."""
    complete = resolve(target)
    if complete != target:
        with naming("put in place", complete):
            also = {*also, *os.listdir(complete)}  # of another kind of save: a complete one has what it wrote alone
            os.makedirs(target, exist_ok=True)
            _link_in(complete, target, also)
        sync_dir(os.path.dirname(target))
    for left in (*_siblings(target, "saving"), *_siblings(target, "replaced")):
        shutil.rmtree(left, ignore_errors=True)


def _clean_up_abandoned(target: str, also: Collection[str]) -> None:
    """The same for names that differ in the number at the end: a killed job may never save to those again."""
    parent, name = os.path.split(target)
    stem = re.escape(name.rstrip("0123456789"))
    pattern = re.compile(rf"\.({stem}\d+)\.(lock$|saving-|replaced-)")
    names = {match[1] for other in os.listdir(parent) if (match := pattern.match(other))}
    for other in sorted(names - {name}):
        with suppress(CheckpointError):  # of a job that saves there at this moment
            lock = _lock(os.path.join(parent, other))
            if lock is not None:
                try:
                    _clean_up(os.path.join(parent, other), also)
                finally:
                    _unlock(lock)


def _exchange(a: str, b: str) -> bool:
    """Swap two names in one step. False if the file system cannot (NFS, for example)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = errno.ENOSYS if rename is None else ctypes.get_errno()
    if code in CANNOT:
        return False
    raise OSError(code, os.strerror(code))


_OWNER = "owner"  # a file that the process locks for as long as it lives


class OwnedDirectory(tempfile.TemporaryDirectory[str]):
    """A new directory whose name begins with ``prefix``. Those of that prefix whose process has ended go."""

    def __init__(self, prefix: str, home: str | None = None) -> None:
        home = home or tempfile.gettempdir()
        for name in os.listdir(home):
            if name.startswith(prefix) and _abandoned(os.path.join(home, name)):
                shutil.rmtree(os.path.join(home, name), ignore_errors=True)
        super().__init__(prefix=prefix, dir=home, ignore_cleanup_errors=True)  # which would hide an error before
        new = os.path.join(self.name, f"{_OWNER}.new")
        self._owner = open(new, "xb")  # noqa: SIM115  held until the directory goes
        with suppress(OSError):  # a file system without locks: nobody can lock it, so nobody removes it
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, os.path.join(self.name, _OWNER))  # once it is locked: nobody finds it without its owner

    def cleanup(self) -> None:
        self._owner.close()
        super().cleanup()


def _abandoned(folder: str) -> bool:
    """Whether it is this user's, and the process that made it has ended."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):  # of another program, being made or removed at this moment, or locked
        if os.stat(folder).st_uid == os.geteuid():
            with open(os.open(os.path.join(folder, _OWNER), flags), "rb+") as f:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    return False
