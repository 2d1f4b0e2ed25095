"""How processes end with the one that started them: a pipe that the kernel closes when the owner ends.

A pipe, because it asks nothing about who the parent is. A signal at the parent's death (prctl) comes when the
thread that started the child ends, goes to children of the direct parent only, which for forks of a server is
the server, and exists on Linux alone.
"""

from __future__ import annotations

import os
from threading import Thread


class Lifeline:
    """The owner's side. ``fd`` is what its processes are given."""

    def __init__(self) -> None:
        self.fd, self._owned = os.pipe()  # neither is inherited unless it is passed on by number

    def close(self) -> None:
        """End the processes that still follow."""
        os.close(self._owned)
        os.close(self.fd)


def follow(fd: int) -> None:
    """End this process when the owner of the lifeline ends, however that comes about."""
    Thread(target=_follow, args=(fd,), name="tpcore lifeline", daemon=True).start()


def _follow(fd: int) -> None:
    os.read(fd, 1)  # nothing is ever written: it returns at the end of the file
    os._exit(1)
