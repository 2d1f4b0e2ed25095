"""Temporary directories. The next process removes those that a killed process has left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from typing import IO

_OWNER = "owner"  # a file that the process locks for as long as it lives


class OwnedDirectory(tempfile.TemporaryDirectory[str]):
    """A new directory whose name begins with ``prefix``. Those of that prefix whose process has ended go."""

    def __init__(self, prefix: str) -> None:
        _sweep(prefix)
        super().__init__(prefix=prefix)
        self._owner = _owned(self.name)

    def cleanup(self) -> None:
        self._owner.close()
        super().cleanup()


def _owned(folder: str) -> IO[bytes]:
    """The file gets its name when it is locked, so that nobody finds it without its owner."""
    new = os.path.join(folder, f"{_OWNER}.new")
    f = open(new, "xb")  # noqa: SIM115  held until the directory goes
    with suppress(OSError):  # a file system without locks: nobody can lock it, so nobody removes it
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(new, os.path.join(folder, _OWNER))
    return f


def _sweep(prefix: str) -> None:
    home = tempfile.gettempdir()
    for name in os.listdir(home):
        if name.startswith(prefix) and _abandoned(os.path.join(home, name)):
            shutil.rmtree(os.path.join(home, name), ignore_errors=True)


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
