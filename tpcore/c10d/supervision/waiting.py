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
from .peers import PeerMonitor
from .status import EnteredCall, Verdict, connection_broke, timeout_report

_LOOK = 17  # past the first calls, the place of every 17th is compared: a prime, so it drifts through a step
_TIMED_OUT = ("Timed out waiting", "Application timeout")  # gloo's words: of a call, and of others beside it
_SLICE = timedelta(seconds=1)  # a wait returns to Python this often, for Ctrl-C and for a verdict


class Waiting:
    """The watch of the group of ``members``, world ranks in its order. ``checked``: how many collectives to compare
    before they run; later ones are compared while they run, over the connections of ``fingerprints``. A transport
    that compares calls itself has none, and calls ``note`` instead of ``enter``. ``library``: path prefixes of the
    backend's own files, which call sites skip. ``lazy``: the transport's wait returns at once and makes a device's
    stream wait."""

    def __init__(
        self,
        axes: Sequence[str],
        members: tuple[int, ...],
        checked: int,
        timeout: float,
        peers: PeerMonitor,
        library: tuple[str, ...],
        lazy: bool,
    ) -> None:
        self.axes, self.members, self.seq = tuple(axes), members, 0
        self._checked, self._timeout, self._lazy, self._closed = checked, timeout, lazy, False
        self.fingerprints: FingerprintExchange | None = None
        self.places, self._library = checked == ALL, library
        self._entries, self._recorder, self._peers = peers.recorder.entries, peers.recorder, peers
        self.neighbours = peers.neighbours  # the ranks of this host, this one among them
        peers.recorder.groups.append(self)

    def enter(self, op: str, x: Tensor) -> None:
        """Before every collective. Raises on all ranks if their calls differ, at the next call at the latest."""
        entry = self.note(op, x, locate=True)
        self._raise_if_over()
        if self.fingerprints is not None:
            self.fingerprints.say(entry)
            self._arrive(self.fingerprints, partial(self.fingerprints.arrived, self.seq <= self._checked))
            self._raise_if_differing(self.fingerprints)

    def note(self, op: str, x: Tensor, locate: bool = False) -> EnteredCall:
        """Called before every collective of a transport that compares calls itself. The call site is taken
        now for checked calls; for later calls ``locate`` or ``call`` take it while the call is running."""
        self.seq += 1
        if self._closed:
            raise BackendError(f"the group of ranks {list(self.members)} was used after tpcore.shutdown()")
        look = locate or self.seq <= self._checked or (self._checked and self.seq % _LOOK == 0)
        site = call_place(*self._library) if look else None
        entry = (self, self.seq, op, x.shape, x.dtype, site)
        self._entries.append(entry)
        return entry

    def locate(self) -> None:
        """Add the call site to the last entry: its call has become slow."""
        entry = self._entries[-1]
        if entry[0] is self:
            self._entries[-1] = (*entry[:-1], entry[-1] or call_place(*self._library))

    def call(self, entry: EnteredCall) -> Call:
        """The Call of ``entry``. Its site is the present one if the entry has none."""
        return Call.of(*entry[1:-1], entry[-1] or call_place(*self._library))

    def ask_after(self, position: int, came: Callable[[], bool]) -> None:
        """Post that the job is lost if the late member at ``position`` has ended before it ``came``."""
        if (ended := self._peers.look([self.members[position]])) and not came():
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
            try:
                work.wait(_SLICE)
            except RuntimeError:
                self._keep_waiting(work)
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
        if self.fingerprints is not None and self.fingerprints.sent:
            self.fingerprints.read()
            self._raise_if_differing(self.fingerprints)

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
        if final := self._peers.final():
            raise final.error(self._recorder.last()) from None
        if time.monotonic() > deadline:
            raise self.expire() from None

    def _reason(self, error: RuntimeError) -> Exception:
        if any(words in str(error) for words in _TIMED_OUT):
            return self.expire()
        self.settle()  # raises if a mismatch was the reason
        return self.lost(error) if connection_broke(error) else error

    @property
    def lost_job(self) -> BackendError | None:
        """The error of the job's verdict; None while there is none."""
        verdict = self._peers.verdict
        return None if verdict is None else verdict.error(self._recorder.last())

    def _raise_if_over(self) -> None:
        """On a device with a queue nothing else raises the job's verdict: no wait fails."""
        if self._lazy and (error := self.lost_job):
            raise error

    def expire(self) -> BackendError:
        """Post that a collective of this group was not complete in time, and return the job's error."""
        peers, reports = self._peers, self._peers.reports()
        text = timeout_report(peers.rank, self.members, self._timeout, reports, lambda r: peers.state(r, reports))
        return peers.post(Verdict("timeout", text)).error(self._recorder.last())

    def _raise_if_differing(self, fingerprints: FingerprintExchange) -> None:
        if mismatch := fingerprints.differing():
            raise fingerprints.error(*mismatch, partial(self._arrive, fingerprints)) from None

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
