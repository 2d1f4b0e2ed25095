"""Directories that appear whole or not at all, and temporary ones that no killed process leaves for long."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from ...errors import CheckpointError
from .contents import link_in, owned, refuse_inside, refuse_other_files, remove_owned
from .files import CANNOT, MANIFEST, make_dirs, naming, sync_dir

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h> and <linux/fs.h>


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


def replaced_names(parent: str) -> list[str]:
    """Names in ``parent`` of which a save moved the previous checkpoint away: see ``resolve``."""
    names = [name.rpartition(".replaced-") for name in os.listdir(parent)]
    return [before[1:] for before, found, _ in names if found and before.startswith(".")]


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


def _unlock(held: IO[bytes] | None) -> None:
    if held is not None:
        with held, suppress(OSError):
            os.unlink(held.name)


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
        refuse_inside(target)
        make_dirs(os.path.dirname(target))
        self._lock = _lock(target)
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
        """Exchange the checkpoint in a directory that stays, since other files are in it. The previous manifest leaves
        first and the new one comes last; in between ``resolve`` finds the new checkpoint where it was written."""
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
            if self._linking:  # otherwise the files there are those of the previous one
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
            _unlock(self._lock)
            self._lock = None


@contextmanager
def new_beside(target: str) -> Iterator[str]:
    """A path to write at, until it is renamed to ``target``. Nothing is left there after the block, and it
    removes what killed processes have left. CheckpointError if another process is in such a block."""
    make_dirs(os.path.dirname(target))
    held = _lock(target)
    path = _sibling(target, f"writing-{uuid.uuid4().hex}")
    try:
        for left in _siblings(target, "writing") if held is not None else ():
            _remove(left)
        yield path
    finally:
        _remove(path)
        _unlock(held)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)


def _clean_up(target: str, also: Collection[str]) -> None:
    """Finish or remove what killed saves to ``target`` have left. The caller holds its lock."""
    found = resolve(target)
    if found != target:
        with naming("put in place", found):
            if os.path.lexists(target):
                link_in(found, target, also)
            else:
                os.rename(found, target)
        sync_dir(os.path.dirname(target))
    for left in (*_siblings(target, "saving"), *_siblings(target, "replaced")):
        shutil.rmtree(left, ignore_errors=True)


def _clean_up_abandoned(target: str, also: Collection[str]) -> None:
    """The same for names that differ in the number at the end: a killed job may never save to those again."""
    parent, name = os.path.split(target)
    stem = re.escape(name.rstrip("0123456789"))
    pattern = re.compile(rf"\.({stem}\d+)\.(lock$|saving-|replaced-)")
    found = {match[1] for other in os.listdir(parent) if (match := pattern.match(other))}
    for other in sorted(found - {name}):
        with suppress(CheckpointError):  # of a job that saves there at this moment
            held = _lock(os.path.join(parent, other))
            if held is not None:
                try:
                    _clean_up(os.path.join(parent, other), also)
                finally:
                    _unlock(held)


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


_OWNER = "owner"  # a file that the process locks for as long as it lives


class OwnedDirectory(tempfile.TemporaryDirectory[str]):
    """A new directory whose name begins with ``prefix``. Those of that prefix whose process has ended go."""

    def __init__(self, prefix: str) -> None:
        home = tempfile.gettempdir()
        for name in os.listdir(home):
            if name.startswith(prefix) and _abandoned(os.path.join(home, name)):
                shutil.rmtree(os.path.join(home, name), ignore_errors=True)
        super().__init__(prefix=prefix)
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
    try:
        if os.stat(folder).st_uid != os.geteuid():
            return False
        fd = os.open(os.path.join(folder, _OWNER), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # of another program, or being made or removed at this moment
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
