"""The names next to a directory that is being replaced, and the lock that one job can hold on it."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from typing import IO

from ..errors import CheckpointError
from .files import MANIFEST, naming

CANNOT = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of a file system that lacks an operation."""


def sibling(target: str, kind: str) -> str:
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{name}.{kind}")


def staging_path(target: str, save_id: str) -> str:
    return sibling(target, f"saving-{save_id}")


def siblings(target: str, kind: str) -> list[str]:
    """The paths ``.name.kind-*`` in the parent directory of ``target``."""
    parent, prefix = os.path.dirname(target), os.path.basename(sibling(target, kind)) + "-"
    names = os.listdir(parent) if os.path.isdir(parent) else []
    return [os.path.join(parent, name) for name in sorted(names) if name.startswith(prefix)]


def replaced_names(parent: str) -> list[str]:
    """Names in ``parent`` of which a save moved the previous checkpoint away: see ``resolve``."""
    names = [name.rpartition(".replaced-") for name in os.listdir(parent)]
    return [before[1:] for before, found, _ in names if found and before.startswith(".")]


def resolve(target: str) -> str:
    """The directory that holds the checkpoint ``target``: ``target`` itself, except after one kind of crash.

    On a file system that cannot swap two names in one step, and in a directory that holds other files, a save
    may die after the previous checkpoint is moved away and before the new one is moved in. The new one is
    complete by then, and its staging directory is returned.
    """
    if not os.path.lexists(os.path.join(target, MANIFEST)):
        for replaced in siblings(target, "replaced"):
            new = staging_path(target, replaced.rpartition("-")[2])
            if os.path.isfile(os.path.join(new, MANIFEST)):
                return new
    return target


def unlock(held: IO[bytes] | None) -> None:
    if held is not None:
        with held, suppress(OSError):
            os.unlink(held.name)


def lock(target: str) -> IO[bytes] | None:
    """A locked file next to ``target``, which one job can hold. None if the file system has no locks."""
    path = sibling(target, "lock")
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
