"""Ends processes together with their owner, by a pipe that the kernel closes when the owner ends.

The owner need not be the parent. prctl's signal at the parent's death would come when the thread that started
the child ends. It also reaches only direct children, and processes forked by a server are the server's. And
it exists only on Linux.
"""

from __future__ import annotations

import os
from threading import Thread


class Lifeline:
    """The owner's side. ``fd``: the descriptor to pass to the processes."""

    def __init__(self) -> None:
        self.fd, self._owned = os.pipe()  # a child inherits neither, unless pass_fds names it

    def close(self) -> None:
        """End the processes that still run ``follow``."""
        os.close(self._owned)
        os.close(self.fd)


def follow(fd: int) -> None:
    """End this process when the owner of the lifeline ends, for whatever reason."""
    Thread(target=_follow, args=(fd,), name="tpcore lifeline", daemon=True).start()


def _follow(fd: int) -> None:
    os.read(fd, 1)  # nobody writes: this returns when the owner's end is closed
    os._exit(1)
