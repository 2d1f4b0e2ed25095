"""What happens around every collective of one group: agreement before it, and a named reason if it fails."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...calls import ALL, Call, agree, call_site
from ...errors import BackendError
from .flight_recorder import Entry, FlightRecorder, timeout_report
from .peers import Peers, of_gloo
from .status_store import Verdict

_SLICE = timedelta(seconds=1)  # a wait returns to Python this often, for Ctrl-C and for a verdict


class Waiting:
    """``members`` are world ranks in group order, ``rank`` the world rank of this process.

    ``checked`` is (n, side): the first n collectives are compared over ``side``, a second gloo group of
    the same ranks: what other code does on the first cannot be taken for a comparison, nor the reverse.
    ``library``: files whose path starts with it belong to the backend and are no place in a program.
    """

    def __init__(
        self,
        axes: Sequence[str],
        members: tuple[int, ...],
        rank: int,
        checked: tuple[int, Any],
        timeout: float,
        journal: FlightRecorder,
        monitor: Peers,
        library: str,
    ) -> None:
        self.axes, self.members, self.rank, self.seq = tuple(axes), members, rank, 0
        (self._checked, self._side), self._timeout = checked, timeout
        self._places, self._library = self._checked == ALL, library
        self._entries, self._journal, self._monitor = journal.entries, journal, monitor
        journal.guards.append(self)

    def enter(self, op: str, x: Tensor) -> None:
        """Before every collective. Raises on all ranks if they are not about to make the same one."""
        self.seq += 1
        entry = (self, self.seq, op, x.shape, x.dtype, call_site(self._library))
        self._entries.append(entry)
        if self.seq <= self._checked:
            self._agree(entry)

    def finish(self, work: Any) -> None:
        """Wait for a collective, or raise the reason why it will not complete."""
        self._journal.waiting = self
        try:
            work.wait(_SLICE)
        except RuntimeError:
            self._keep_waiting(work)
        self._journal.waiting = None

    def close(self) -> None:
        """From now on a collective is an error, and gloo's objects are free to go."""
        self._checked, self._side = 1 << 62, None

    def _keep_waiting(self, work: Any) -> None:
        """After an error of ``wait``: its own, that the slice is over, or that of the collective."""
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            final = self._monitor.final()
            if final is not None:
                raise final.error(self._journal.last()) from None
            if time.monotonic() > deadline:
                raise self._timed_out() from None
            with suppress(RuntimeError):
                work.wait(_SLICE)
        try:
            work.wait()
        except RuntimeError as e:
            # not chained: all that gloo says is that some connection closed, or that time is over
            raise self._reason(e) from None

    def _reason(self, error: RuntimeError) -> Exception:
        if "Timed out waiting" in str(error):
            return self._timed_out()
        if of_gloo(error):
            return self._monitor.diagnose(self.members, error).error(self._journal.last())
        return error

    def _timed_out(self) -> BackendError:
        monitor = self._monitor
        reports = monitor.reports()
        text = timeout_report(
            self.rank, self.members, self._timeout, reports, lambda r: monitor.state(r, reports[r])
        )
        return monitor.post(Verdict("timeout", text)).error(self._journal.last())

    def _agree(self, entry: Entry) -> None:
        if self._side is None:
            raise BackendError(f"the group of ranks {list(self.members)} was used after tpcore.shutdown()")
        agree(Call.of(*entry[1:]), self.members, self._exchange, self._places)

    def _exchange(self, mine: bytes) -> bytes:
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        got = torch.empty(len(mine) * len(self.members), dtype=torch.uint8)
        self.finish(self._side._allgather_base(got, sent))
        return got.numpy().tobytes()
