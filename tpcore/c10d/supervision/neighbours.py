"""The ranks of this host, and what its kernel knows of their processes."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Sequence

from .host import Identity


class Neighbours:
    """Watches the processes of this host's ranks. ``rank``: this process. ``ranks``: all on its host."""

    def __init__(self, rank: int, peers: Sequence[Identity]) -> None:
        self._rank, self._peers = rank, peers
        self.ranks = [r for r, p in enumerate(peers) if p.neighbour_of(peers[rank]) or r == rank]
        self._unwatched: list[int] = []
        self._watched: list[int] = []

    def fate(self, rank: int) -> str | None:
        """How the process of one of ``ranks`` ended; None while it lives."""
        return self._peers[rank].fate()

    def stopped(self) -> tuple[int, ...]:
        """The other ranks whose processes a signal or a debugger has stopped."""
        return tuple(r for r in self.ranks if r != self._rank and self._peers[r].stopped())

    def watch(self, selector: selectors.BaseSelector, died: Callable[[int], None]) -> None:
        """Call ``died`` when a process ends, early enough to read its exit status before its parent does."""
        for rank in self.ranks:
            if rank != self._rank:
                try:
                    self._watched.append(os.pidfd_open(self._peers[rank].pid))
                except (AttributeError, OSError):  # an old Python or kernel, or dead already
                    self._unwatched.append(rank)
                else:
                    selector.register(self._watched[-1], selectors.EVENT_READ, (died, rank))

    def dead(self) -> list[int]:
        """The ranks that ``watch`` could not watch and that have ended since the last call."""
        found = [r for r in self._unwatched if self.fate(r) is not None]
        self._unwatched = [r for r in self._unwatched if r not in found]
        return found

    def close(self) -> None:
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
