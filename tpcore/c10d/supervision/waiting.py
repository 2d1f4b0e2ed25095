"""The watch around every collective of one group: it compares the calls, and explains a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...comm.signature import ALL, Call, call_place
from ...errors import BackendError
from .fingerprints import FingerprintExchange
from .flight_recorder import Entry, FlightRecorder, Verdict, connection_broke, timeout_report
from .peers import PeerMonitor

_LOOK = 17  # past the first calls, the place of every 17th is compared: a prime, so it drifts through a step
_TIMED_OUT = ("Timed out waiting", "Application timeout")  # gloo's words: of a call, and of others beside it
_SLICE = timedelta(seconds=1)  # a wait returns to Python this often, for Ctrl-C and for a verdict


class Waiting:
    """``members`` are world ranks in group order, ``rank`` the world rank of this process.

    ``checked``: how many collectives to compare before they run. Later ones are compared while they run. The comparison
    uses the connections of ``fingerprints``, so it cannot mix with other code's calls on the group. A transport that
    compares calls itself has none, and calls ``note`` instead of ``enter``. ``library``: path prefixes of the backend's
    own files, which call sites skip. ``lazy``: the transport's wait returns at once and makes a device's stream wait.
    """

    def __init__(
        self,
        axes: Sequence[str],
        members: tuple[int, ...],
        rank: int,
        checked: int,
        timeout: float,
        recorder: FlightRecorder,
        peers: PeerMonitor,
        library: tuple[str, ...],
        lazy: bool,
    ) -> None:
        self.axes, self.members, self.rank, self.seq = tuple(axes), members, rank, 0
        self._checked, self._timeout = checked, timeout
        self.fingerprints: FingerprintExchange | None = None
        self._closed = False
        self.places, self._library = checked == ALL, library
        self._entries, self._recorder, self._peers = recorder.entries, recorder, peers
        self._lazy = lazy
        recorder.groups.append(self)

    def enter(self, op: str, x: Tensor) -> None:
        """Called before every collective. Raises on all ranks if their calls differ: before a checked call
        runs, else at the next call at the latest."""
        self.seq += 1
        if self._closed:
            raise self._unusable()
        self._raise_if_over()
        entry = (self, self.seq, op, x.shape, x.dtype, call_place(*self._library))
        self._entries.append(entry)
        if self.fingerprints is not None:
            self.fingerprints.say(entry)
            self._compare(self.fingerprints, self.seq <= self._checked)

    def note(self, op: str, x: Tensor) -> Entry:
        """Called before every collective of a transport that compares calls itself. The call site is taken
        now for checked calls; for later calls ``locate`` or ``call`` take it while the call is running."""
        self.seq += 1
        if self._closed:
            raise self._unusable()
        look = self.seq <= self._checked or (self._checked and self.seq % _LOOK == 0)
        site = call_place(*self._library) if look else None
        entry = (self, self.seq, op, x.shape, x.dtype, site)
        self._entries.append(entry)
        return entry

    def locate(self) -> None:
        """Add the call site to the last entry: its call has become slow."""
        entry = self._entries[-1]
        if entry[0] is self:
            self._entries[-1] = (*entry[:-1], entry[-1] or call_place(*self._library))

    def call(self, entry: Entry) -> Call:
        """The Call of ``entry``. Its site is the present one if the entry has none."""
        return Call.of(*entry[1:-1], entry[-1] or call_place(*self._library))

    def neighbours(self) -> frozenset[int]:
        """The ranks of this host, this one among them."""
        return self._peers.neighbours()

    def ask_after(self, position: int, came: Callable[[], bool]) -> None:
        """Post that the job is lost if the process of the late member at ``position`` ended before it
        ``came``: shared memory has no connection that closes."""
        ended = self._peers.look([self.members[position]])
        if ended is not None and not came():
            self._peers.post(ended)

    def parting(self, part: Callable[[], None]) -> Callable[[], None]:
        """Register ``part``, to be called by any thread when this rank leaves; return the undo function."""
        self._peers.partings.add(part)
        return lambda: self._peers.partings.discard(part)

    def lost(self, error: Exception) -> Exception:
        """The error to raise after ``error``, a lost connection: it names the lost member and the reason."""
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
        self.settle()  # before the program uses the result

    def close(self) -> None:
        """Every later collective raises BackendError."""
        self._closed = True
        if self.fingerprints is not None:
            self.fingerprints.close()

    def settle(self) -> None:
        """Raise if the fingerprints received so far show that ranks have made different calls."""
        self._raise_if_over()
        if self.fingerprints is not None and not self.fingerprints.settled:
            self.fingerprints.read()
            self._raise_if_differing(self.fingerprints)

    def _wait_in_slices(self, work: Any) -> None:
        try:
            work.wait(_SLICE)
        except RuntimeError:
            self._keep_waiting(work)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as e:
            # not chained: gloo's error only says that some connection closed or that time is over
            raise self._reason(e) from None

    def _keep_waiting(self, work: Any) -> None:
        """Handle an error of ``wait``: the end of a slice, or an error of the collective."""
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            self.settle()
            self._raise_if_lost(deadline)
            with suppress(RuntimeError):
                work.wait(_SLICE)
        self._wait(work)

    def _raise_if_lost(self, deadline: float) -> None:
        """Raise the job's verdict, if there is one, or that the time is over."""
        final = self._peers.final()
        if final is not None:
            raise final.error(self._recorder.last()) from None
        if time.monotonic() > deadline:
            raise self._timed_out() from None

    def _reason(self, error: RuntimeError) -> Exception:
        if any(words in str(error) for words in _TIMED_OUT):
            return self._timed_out()
        self.settle()  # raises if a mismatch was the reason
        if connection_broke(error):
            return self._peers.diagnose(self.members, error).error(self._recorder.last())
        return error

    def expire(self) -> None:
        """Post that a collective of this group was not complete in time. For a thread that watches a device."""
        self._timed_out()

    @property
    def lost_job(self) -> BackendError | None:
        """The error of the job's verdict; None while there is none."""
        verdict = self._peers.verdict
        return None if verdict is None else verdict.error(self._recorder.last())

    def _raise_if_over(self) -> None:
        """On a device with a queue nothing else raises the job's verdict: no wait fails."""
        if self._lazy and (error := self.lost_job) is not None:
            raise error

    def _timed_out(self) -> BackendError:
        peers = self._peers
        reports = peers.reports()
        text = timeout_report(self.rank, self.members, self._timeout, reports, lambda r: peers.state(r, reports))
        return peers.post(Verdict("timeout", text)).error(self._recorder.last())

    def _compare(self, fingerprints: FingerprintExchange, now: bool) -> None:
        self._arrive(fingerprints, partial(fingerprints.arrived, now))
        self._raise_if_differing(fingerprints)

    def _raise_if_differing(self, fingerprints: FingerprintExchange) -> None:
        found = fingerprints.differing()
        if found is not None:
            raise fingerprints.error(*found, partial(self._arrive, fingerprints)) from None

    def _arrive(self, fingerprints: FingerprintExchange, arrived: Callable[[], bool]) -> None:
        """Wait until fingerprints, or a text, have ``arrived``."""
        self._recorder.waiting, deadline = self, time.monotonic() + self._timeout
        try:
            while not arrived():
                self._raise_if_lost(deadline)
                fingerprints.wait(_SLICE.total_seconds())
        except dist.DistNetworkError as e:
            raise self._reason(e) from None
        self._recorder.waiting = None

    def _unusable(self) -> BackendError:
        return BackendError(f"the group of ranks {list(self.members)} was used after tpcore.shutdown()")
