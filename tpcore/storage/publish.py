"""Atomic directories: a directory appears under its name whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from typing import IO

from ..errors import CheckpointError
from .files import MANIFEST, PREFIX, loads, make_dirs, naming, read_file, sync_dir

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h> and <linux/fs.h>
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
_CANNOT_LINK = {*_CANNOT, errno.EPERM, errno.EMLINK, errno.EXDEV}


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

    On a file system that cannot swap two names in one step, and in a directory that holds other files, a save
    may die after the previous checkpoint is moved away and before the new one is moved in. The new one is
    complete by then, and its staging directory is returned.
    """
    if not os.path.lexists(os.path.join(target, MANIFEST)):
        for replaced in _siblings(target, "replaced"):
            new = staging_path(target, replaced.rpartition("-")[2])
            if os.path.isfile(os.path.join(new, MANIFEST)):
                return new
    return target


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
        self._old = _sibling(target, f"replaced-{save_id}")
        make_dirs(os.path.dirname(target))
        self._lock = _lock(target)
        try:
            self._clean_up()
            _refuse_other_files(target, format, also, others_stay)
            with naming("make the directory", self.path):
                os.mkdir(self.path)
        except BaseException:
            self.close()
            raise

    def _clean_up(self) -> None:
        """Finish or remove the leftovers of killed saves."""
        found = resolve(self.target)
        if found != self.target:
            with naming("put in place", found):
                if os.path.lexists(self.target):
                    self._link_in(found)
                else:
                    os.rename(found, self.target)
            sync_dir(os.path.dirname(self.target))
        for left in (*_siblings(self.target, "saving"), *_siblings(self.target, "replaced")):
            shutil.rmtree(left, ignore_errors=True)

    def commit(self) -> None:
        """Replace ``target`` by the new directory. Readers of the name never see a partial one."""
        with naming("put in place", self.target):
            if not os.path.lexists(self.target) or not os.listdir(self.target):
                os.rename(self.path, self.target)
            elif len(self._owned(self.target)) < len(os.listdir(self.target)):
                self._exchange_inside()
            elif not _exchange(self.path, self.target):
                os.rename(self.target, self._old)
                os.rename(self.path, self.target)
        sync_dir(os.path.dirname(self.target))

    def _owned(self, folder: str) -> list[str]:
        """What a checkpoint has put into ``folder``, its manifest last."""
        names = [n for n in sorted(os.listdir(folder)) if _is_owned(n, self._also)]
        return sorted(names, key=MANIFEST.__eq__)

    def _exchange_inside(self) -> None:
        """Exchange the checkpoint in a directory that stays, since other files are in it.

        The previous manifest leaves first and the new one comes last. In between ``resolve`` finds the new
        checkpoint where it was written: its files are linked into the directory and not moved.
        """
        os.mkdir(self._old)
        for name in reversed(self._owned(self.target)):
            os.rename(os.path.join(self.target, name), os.path.join(self._old, name))
        self._linking = True
        self._link_in(self.path)

    def _link_in(self, source: str) -> None:
        """Let ``target`` hold the checkpoint of ``source`` too, in the place of what is there of one."""
        self._remove_owned()
        for name in self._owned(source):
            _link(os.path.join(source, name), os.path.join(self.target, name))
            sync_dir(self.target)

    def _remove_owned(self) -> None:
        for name in reversed(self._owned(self.target)):
            path = os.path.join(self.target, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    def _restore(self) -> None:
        """Undo a ``commit`` that failed after it had moved the previous checkpoint away."""
        if not os.path.lexists(self.target):
            os.rename(self._old, self.target)
        elif not os.path.lexists(os.path.join(self.target, MANIFEST)):
            if self._linking:  # else what is there is of the previous one
                self._remove_owned()
            for name in self._owned(self._old):
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
            if self._lock is not None:
                with self._lock, suppress(OSError):
                    os.unlink(self._lock.name)
                self._lock = None


def _is_owned(name: str, also: Collection[str]) -> bool:
    return name == MANIFEST or name in also or name.startswith(PREFIX)


def _link(source: str, target: str) -> None:
    """Hard links to all files of ``source``; copies on a file system without hard links."""
    if os.path.isdir(source):
        os.mkdir(target)
        for name in os.listdir(source):
            _link(os.path.join(source, name), os.path.join(target, name))
        sync_dir(target)
        return
    try:
        os.link(source, target)
    except OSError as e:
        if e.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, target)
        with open(target, "rb") as f:
            os.fsync(f.fileno())


def _refuse_other_files(target: str, format: str, also: Collection[str], others_stay: bool) -> None:
    """CheckpointError if saving would remove files of ``target`` that are not from a checkpoint."""
    if not os.path.lexists(target):
        return
    with naming("list", target):
        names = sorted(os.listdir(target))
    owned = [name for name in names if _is_owned(name, also)]
    wrong = [] if others_stay else [name for name in names if name not in owned]
    if MANIFEST in names:
        _refuse_other_format(target, format)
    else:
        wrong += owned
    if wrong:
        raise CheckpointError(
            f"cannot save to {target}: saving would replace the directory, and it holds {wrong[0]!r}"
            + (f" and {len(wrong) - 1} more" if wrong[1:] else "")
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
