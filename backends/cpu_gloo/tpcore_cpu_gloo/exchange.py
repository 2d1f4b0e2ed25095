"""The protocol of shared buffers: which buffer is next, and the wait until every member has filled it. Each rank
alternates between two buffers: it fills its own, posts one semaphore for each peer, takes one of each peer, and
reads the peers' buffers. A rank that has taken every peer's post n knows that all have read the buffers of post n -
1, since they read before they post n. So the buffer of n - 1 is free for n + 1 without another message."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tpcore.c10d.supervision.status import EnteredCall
from tpcore.c10d.supervision.waiting import Waiting
from tpcore.comm.signature import Call, Places, disagreement, word_of
from tpcore.errors import CollectiveMismatchError

from .segment import CALL, LEFT, PLACE, ROOM, Segment, busy, post_to, sleep_on

_SPINS = 150  # of 0.3 us each: longer than a punctual peer takes
_AWAKE = 2e-3
"""Seconds of yields to other processes before a rank sleeps, more than ranks of one program come apart. A sleeping core
of a virtual machine takes 50 to 80 us to wake; where others want the core, one yield may take all of it."""
_SLICE = 0.5  # seconds of sleep between two checks that the peer's process is alive
_TEXTS = word_of("texts of calls that differ")
Announced = tuple[int, int, EnteredCall]
"""A call: its hash, the hash of its place (0: unknown), and its entry in the recorder."""


class Exchange:
    """The exchanges of one group, in one order. Transports over the same members share one."""

    def __init__(self, segment: Segment, waiting: Waiting, crowd: int) -> None:
        """``crowd``: number of ranks on this host. If it exceeds the cores, a wait yields at once."""
        self.segment, self.waiting = segment, waiting
        self.plans: dict[Any, Any] = {}
        """The transport's cache for repeated calls, cleared when the buffers' size changes."""
        self.pending: Callable[[], object] | None = None
        """Completes the call that is posted but not taken yet."""
        self._next = self._posts = 0
        self._places = Places()
        self._cancel_parting = waiting.parting(self._leave)
        self._spins = _SPINS if crowd <= len(os.sched_getaffinity(0)) else 1

    def next_buffer(self) -> int:
        """The buffer to fill now."""
        if self.pending is not None:
            self.pending()
        buffer, self._next = self._next, 1 - self._next
        return buffer

    def meet(self, call: Announced) -> None:
        """This rank has filled its buffer for ``call``. Wait until every member has, for the same call."""
        self.post(call)
        self.take(call)

    def post(self, call: Announced) -> None:
        # The words of two posts lie side by side: no member is further ahead. The count in them tells a post that
        # wakes the others for good, of a rank that leaves, from the post of a call.
        self._posts += 1
        line = self.segment.lines[self._posts & 1][self.segment.position]
        line[CALL], line[PLACE] = call[0] ^ self._posts, call[1]
        for address in self.segment.posts:
            post_to(address)

    def take(self, call: Announced) -> None:
        for peer, address in self.segment.waits:
            if busy(address):
                self._wait(peer, address)
        word, place, entry = call
        word ^= self._posts
        line = self.segment.lines[self._posts & 1]
        for words in line:
            if words[CALL] != word:
                if any(of_rank[LEFT] for of_rank in self.segment.lines[0]):
                    raise self.waiting.lost(ConnectionResetError("it makes no more calls"))
                raise self._mismatch(entry, False)
        if place:
            places = [words[PLACE] for words in line]
            if self._places.swapped(range(len(places)), places):
                raise self._mismatch(entry, True)

    def room(self, need: int, call: Announced, whole: bool = False) -> int:
        """Bytes of a buffer to use, equal on all ranks: ``need`` if all can reserve it; a piece unless ``whole``."""
        segment, most = self.segment, self.segment.whole if whole else self.segment.most
        if segment.room >= min(need, most):
            return min(segment.room, most)
        # multiples of large pieces: a power of two could be twice as much memory
        wanted = 1 << (need - 1).bit_length() if need < segment.most else -(-need // segment.most) * segment.most
        wanted = granted = min(most, wanted)
        try:
            segment.reserve(wanted)
        except OSError:
            granted = segment.room
        line = segment.lines[self.next_buffer()]
        line[segment.position][ROOM] = granted
        self.meet(call)
        segment.room = min(words[ROOM] for words in line)
        if segment.room < wanted:
            segment.most, segment.whole = min(segment.most, segment.room), segment.room  # no more is available
        self.plans.clear()
        return min(segment.room, most)

    def close(self) -> None:
        self._cancel_parting()
        self.plans.clear()
        self.pending = None
        self.segment.close()

    def _wait(self, peer: int, address: int) -> None:
        for _ in range(self._spins):
            if not busy(address):
                return
        until = time.monotonic() + _AWAKE
        while time.monotonic() < until:
            os.sched_yield()
            if not busy(address):
                return
        self.waiting.locate()
        self.waiting.finish(_Post(peer, address, self.waiting))

    def _leave(self) -> None:
        """Tell peers that this rank leaves, as a closed connection would: they wake up now or at their next call.
        They still complete the call that this rank posted last. Any thread may call it, in the middle of a call too."""
        self.segment.lines[0][self.segment.position][LEFT] = 1
        for address in self.segment.posts:
            post_to(address)

    def _mismatch(self, entry: EnteredCall, place: bool) -> CollectiveMismatchError:
        """The error for calls that differ. All members find this and call it; they exchange their calls."""
        waiting = self.waiting
        self.segment.write(waiting.call(entry).pack())
        self.meet((_TEXTS, 0, entry))
        calls = [Call.unpack(text) for text in self.segment.texts()]
        return CollectiveMismatchError(disagreement(calls, waiting.members, place or waiting.places))


class _Post:
    """The next post of one peer, as a work object for ``Waiting.finish``."""

    def __init__(self, peer: int, address: int, waiting: Waiting) -> None:
        self._peer, self._address, self._waiting, self._taken = peer, address, waiting, False

    def wait(self, limit: timedelta = timedelta(days=1)) -> None:
        self._taken = self.is_completed() or sleep_on(self._address, min(_SLICE, limit.total_seconds()))
        if not self._taken:  # shared memory has no connection that closes when a process ends
            self._waiting.ask_after(self._peer, self.is_completed)
            raise RuntimeError("not yet")

    def is_completed(self) -> bool:
        self._taken = self._taken or not busy(self._address)
        return self._taken
