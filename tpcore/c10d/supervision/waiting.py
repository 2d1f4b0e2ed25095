"""What happens around every collective of one group: agreement before it, and a named reason if it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import Tensor

from ...calls import ALL, Call, call_site
from ...errors import BackendError
from .flight_recorder import Entry, FlightRecorder, timeout_report
from .peers import Peers
from .verdict import Verdict, connection_broke
from .words import Words, WordsAwaited

_LOOK = 17  # of how many calls past the first ones the place of one is compared: 17 divides no step's number
_SLICE = timedelta(seconds=1)  # a wait returns to Python this often, for Ctrl-C and for a verdict


class Waiting:
    """``members`` are world ranks in group order, ``rank`` the world rank of this process.

    ``checked``: how many collectives to compare before they run. Later ones are compared while they run.
    They are compared over ``words``: what other code does on the group cannot be taken for a comparison, nor
    the reverse. A transport that compares calls itself needs none, and begins them with ``note``.
    ``library``: files whose path starts with one of these are the backend's and no places in a program.
    ``lazy``: the main transport's wait makes a device's stream wait and returns at once.
    """

    def __init__(
        self,
        axes: Sequence[str],
        members: tuple[int, ...],
        rank: int,
        checked: int,
        timeout: float,
        recorder: FlightRecorder,
        peers: Peers,
        library: tuple[str, ...],
        lazy: bool,
    ) -> None:
        self.axes, self.members, self.rank, self.seq = tuple(axes), members, rank, 0
        self._checked, self._timeout = checked, timeout
        self.words: Words | None = None
        self._closed = False
        self.places, self._library = checked == ALL, library
        self._entries, self._recorder, self._peers = recorder.entries, recorder, peers
        self._lazy = lazy
        recorder.groups.append(self)

    def enter(self, op: str, x: Tensor) -> None:
        """Before every collective. Raises on all ranks if they do not make the same one: before it runs while
        calls are checked, else at the next one at the latest."""
        self.seq += 1
        if self._closed:
            raise self._unusable()
        entry = (self, self.seq, op, x.shape, x.dtype, call_site(*self._library))
        self._entries.append(entry)
        if self.words is not None:
            self.words.say(entry)
            self._compare(self.words, self.seq <= self._checked)

    def note(self, op: str, x: Tensor) -> Entry:
        """Before every collective of a transport that compares them itself. The call's place is looked up
        while calls are checked; later it is found when somebody asks, while the call is on the stack."""
        self.seq += 1
        if self._closed:
            raise self._unusable()
        look = self.seq <= self._checked or (self._checked and self.seq % _LOOK == 0)
        site = call_site(*self._library) if look else None
        entry = (self, self.seq, op, x.shape, x.dtype, site)
        self._entries.append(entry)
        return entry

    def locate(self) -> None:
        """The last call has become slow: note its place now."""
        entry = self._entries[-1]
        if entry[0] is self:
            self._entries[-1] = (*entry[:-1], entry[-1] or call_site(*self._library))

    def call(self, entry: Entry) -> Call:
        """What ``entry`` says, with the place where the program is now if it has none."""
        return Call.of(*entry[1:-1], entry[-1] or call_site(*self._library))

    def neighbours(self) -> frozenset[int]:
        """The ranks of this host, this one among them."""
        return self._peers.neighbours()

    def ask_after(self, position: int, came: Callable[[], bool]) -> None:
        """The member at ``position`` is late. If its process has ended and it did not come before, the job is
        lost: in shared memory no connection closes."""
        ended = self._peers.look([self.members[position]])
        if ended is not None and not came():
            self._peers.post(ended)

    def parting(self, part: Callable[[], None]) -> Callable[[], None]:
        """``part`` will be called when this rank leaves, by any thread; return what takes that back."""
        self._peers.partings.add(part)
        return lambda: self._peers.partings.discard(part)

    def lost(self, error: Exception) -> Exception:
        """A member has left, as ``error`` says: which, and why."""
        self.locate()
        return self._peers.diagnose(self.members, error).error(self._recorder.last())

    def finish(self, work: Any) -> None:
        """Wait for a collective, or raise the reason why it will not complete."""
        self._recorder.waiting = self
        if self._lazy:
            self._wait(work)
        else:
            self._wait_in_slices(work)
        self._recorder.waiting = None
        self.settle()  # before the result is used

    def close(self) -> None:
        """From now on a collective is an error."""
        self._closed = True
        if self.words is not None:
            self.words.close()

    def settle(self) -> None:
        """Raise if ranks have made different calls, as far as that is known by now."""
        if self.words is not None and not self.words.settled:
            self.words.read()
            self._raise_if_differing(self.words)

    def _wait_in_slices(self, work: Any) -> None:
        try:
            work.wait(_SLICE)
        except RuntimeError:
            self._keep_waiting(work)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as e:
            # not chained: all that gloo says is that some connection closed, or that time is over
            raise self._reason(e) from None

    def _keep_waiting(self, work: Any) -> None:
        """After an error of ``wait``: its own, that the slice is over, or that of the collective."""
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            if not isinstance(work, WordsAwaited):
                self.settle()
            final = self._peers.final()
            if final is not None:
                raise final.error(self._recorder.last()) from None
            if time.monotonic() > deadline:
                raise self._timed_out() from None
            with suppress(RuntimeError):
                work.wait(_SLICE)
        self._wait(work)

    def _reason(self, error: RuntimeError) -> Exception:
        if "Timed out waiting" in str(error):
            return self._timed_out()
        self.settle()  # which may have been why
        if connection_broke(error):
            return self._peers.diagnose(self.members, error).error(self._recorder.last())
        return error

    def _timed_out(self) -> BackendError:
        peers = self._peers
        reports = peers.reports()
        text = timeout_report(
            self.rank, self.members, self._timeout, reports, lambda r: peers.state(r, reports)
        )
        return peers.post(Verdict("timeout", text)).error(self._recorder.last())

    def _compare(self, words: Words, now: bool) -> None:
        words.read()
        if words.due(now):
            self._arrive(WordsAwaited(words, now=now))
        self._raise_if_differing(words)

    def _raise_if_differing(self, words: Words) -> None:
        found = words.differing()
        if found is not None:
            raise words.error(*found, self._arrive) from None

    def _arrive(self, arrival: WordsAwaited) -> None:
        self._recorder.waiting = self
        self._wait_in_slices(arrival)
        self._recorder.waiting = None

    def _unusable(self) -> BackendError:
        return BackendError(f"the group of ranks {list(self.members)} was used after tpcore.shutdown()")
