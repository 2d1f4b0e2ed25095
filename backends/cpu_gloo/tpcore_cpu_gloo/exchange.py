"""Which buffer comes next, and waiting until every member has filled it.

Two buffers per rank are used one after the other: fill mine, post one semaphore for each peer, take one from
each, read theirs. Who has taken everyone's post n knows that all have read what came with post n - 1, since
they read it before they post n. So the buffer of n - 1 is free for n + 1, and nobody needs to be asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tpcore.c10d.supervision.flight_recorder import Entry
from tpcore.c10d.supervision.waiting import Waiting
from tpcore.calls import Call, Places, disagreement, word_of
from tpcore.errors import CollectiveMismatchError

from . import semaphores
from .segment import CALL, PLACE, Segment

_SPINS = 150  # of 0.3 us: longer than a peer takes that is not late
_YIELDS = 200
_SLICE = 0.5  # seconds of sleep, after which somebody looks whether the peer still lives


Announced = tuple[int, int, Entry]
"""A call: the words that stand for it and for its place (0: not looked at), and its entry in the recorder."""


_TEXTS = word_of("texts of calls that differ")
_GONE = word_of("this rank makes no more calls")


class Exchange:
    """The meetings of one group. Transports over the same members share one: their order is common."""

    def __init__(self, segment: Segment, waiting: Waiting, crowd: int) -> None:
        """``crowd``: ranks of this host. If they are more than its cores, waiting leaves them at once."""
        self.segment, self.waiting = segment, waiting
        self.plans: dict[Any, Any] = {}
        """What a transport keeps for calls that it has seen, as long as the buffers have one size."""
        self.pending: Callable[[], object] | None = None
        """Completes what was posted and not taken yet."""
        self._next, self._posted = 0, 1
        self._places, self._positions = Places(), range(segment.size)
        self._words = [segment.words(b) for b in (0, 1)]
        self._stay = waiting.parting(self._leave)
        self._spins = _SPINS if crowd <= len(os.sched_getaffinity(0)) else 1

    def next_buffer(self) -> int:
        """The buffer to fill now."""
        if self.pending is not None:
            self.pending()
        buffer, self._next = self._next, 1 - self._next
        return buffer

    def meet(self, buffer: int, call: Announced) -> None:
        """Mine is filled for ``call``; return when everyone's is, for the same."""
        self.post(buffer, call)
        self.take(buffer, call)

    def post(self, buffer: int, call: Announced) -> None:
        view, at = self._words[buffer][self.segment.position]
        view[at + CALL], view[at + PLACE] = call[:2]
        self._posted = buffer
        for address in self.segment.posts:
            semaphores.post(address)

    def take(self, buffer: int, call: Announced) -> None:
        for peer, address in self.segment.waits:
            if semaphores.busy(address):
                self._wait(peer, address)
        word, place, entry = call
        for view, at in self._words[buffer]:
            if view[at + CALL] != word:
                raise self._lost() if self._someone_left(buffer) else self._mismatch(entry, False)
        if place:
            places = [view[at + PLACE] for view, at in self._words[buffer]]
            if self._places.swapped(self._positions, places):
                raise self._mismatch(entry, True)

    def room(self, need: int, call: Announced) -> int:
        """Bytes of a buffer that may be used, on all ranks the same: as much as ``need``, if all have it."""
        segment = self.segment
        if segment.room >= min(need, segment.most):
            return segment.room
        wanted = granted = min(segment.most, 1 << (need - 1).bit_length())
        try:
            segment.reserve(wanted)
        except OSError:
            granted = segment.room
        buffer = self.next_buffer()
        segment.offer(buffer, granted)
        self.meet(buffer, call)
        segment.room = segment.offered(buffer)
        if segment.room < wanted:
            segment.most = segment.room  # there is no more
        self.plans.clear()
        return segment.room

    def close(self) -> None:
        self._stay()
        self.plans.clear()
        self.pending = None
        self.segment.close()

    def _wait(self, peer: int, address: int) -> None:
        for _ in range(self._spins):
            if not semaphores.busy(address):
                return
        for _ in range(_YIELDS):
            os.sched_yield()
            if not semaphores.busy(address):
                return
        self.waiting.locate()
        self.waiting.finish(_Post(peer, address, self.waiting))

    def _leave(self) -> None:
        """What the end of a connection is elsewhere: peers wake up, now or at their next call.

        They still complete the call that this rank posted last.
        """
        view, at = self._words[1 - self._posted][self.segment.position]
        view[at + CALL] = _GONE
        for address in self.segment.posts:
            semaphores.post(address)

    def _someone_left(self, buffer: int) -> bool:
        return any(view[at + CALL] == _GONE for view, at in self._words[buffer])

    def _lost(self) -> Exception:
        return self.waiting.lost(ConnectionResetError("it makes no more calls"))

    def _mismatch(self, entry: Entry, place: bool) -> CollectiveMismatchError:
        """All members see that words differ and come here: each tells what it was about to do."""
        waiting = self.waiting
        self.segment.write(waiting.call(entry).pack())
        self.meet(self.next_buffer(), (_TEXTS, 0, entry))
        calls = [Call.unpack(text) for text in self.segment.texts()]
        return CollectiveMismatchError(disagreement(calls, waiting.members, place or waiting.places))


class _Post:
    """The next post of one peer, as what ``Waiting.finish`` waits for."""

    def __init__(self, peer: int, address: int, waiting: Waiting) -> None:
        self._peer, self._address, self._waiting, self._taken = peer, address, waiting, False

    def wait(self, limit: timedelta = timedelta(days=1)) -> None:
        if self.is_completed() or semaphores.take(self._address, min(_SLICE, limit.total_seconds())):
            self._taken = True
            return
        # no connection closes when a process has ended
        self._waiting.ask_after(self._peer, self.is_completed)
        raise RuntimeError("not yet")

    def is_completed(self) -> bool:
        self._taken = self._taken or not semaphores.busy(self._address)
        return self._taken
