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
from .peers import Peers, connection_broke
from .status_store import Verdict

_SLICE = timedelta(seconds=1)  # a wait returns to Python this often, for Ctrl-C and for a verdict


class Waiting:
    """``members`` are world ranks in group order, ``rank`` the world rank of this process.

    ``checked`` is (n, side): the first n collectives are compared over ``side``, a second gloo group of
    the same ranks: what other code does on the first cannot be taken for a comparison, nor the reverse.
    ``library``: files whose path starts with one of these are the backend's and no places in a program.
    ``lazy``: the main transport's wait makes a device's stream wait and returns at once.
    """

    def __init__(
        self,
        axes: Sequence[str],
        members: tuple[int, ...],
        rank: int,
        checked: tuple[int, Any],
        timeout: float,
        recorder: FlightRecorder,
        peers: Peers,
        library: tuple[str, ...],
        lazy: bool,
    ) -> None:
        self.axes, self.members, self.rank, self.seq = tuple(axes), members, rank, 0
        (self._checked, self._side), self._timeout = checked, timeout
        self._places, self._library = self._checked == ALL, library
        self._entries, self._recorder, self._peers = recorder.entries, recorder, peers
        self._lazy = lazy
        recorder.groups.append(self)

    def enter(self, op: str, x: Tensor) -> None:
        """Before every collective. Raises on all ranks if they are not about to make the same one."""
        self.seq += 1
        entry = (self, self.seq, op, x.shape, x.dtype, call_site(*self._library))
        self._entries.append(entry)
        if self.seq <= self._checked:
            self._agree(entry)

    def finish(self, work: Any) -> None:
        """Wait for a collective, or raise the reason why it will not complete."""
        self._recorder.waiting = self
        if self._lazy:
            self._wait(work)
        else:
            self._wait_in_slices(work)
        self._recorder.waiting = None

    def close(self) -> None:
        """From now on a collective is an error, and gloo's objects are free to go."""
        self._checked, self._side = 1 << 62, None

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
        if connection_broke(error):
            return self._peers.diagnose(self.members, error).error(self._recorder.last())
        return error

    def _timed_out(self) -> BackendError:
        peers = self._peers
        reports = peers.reports()
        text = timeout_report(
            self.rank, self.members, self._timeout, reports, lambda r: peers.state(r, reports[r])
        )
        return peers.post(Verdict("timeout", text)).error(self._recorder.last())

    def _agree(self, entry: Entry) -> None:
        if self._side is None:
            raise BackendError(f"the group of ranks {list(self.members)} was used after tpcore.shutdown()")
        agree(Call.of(*entry[1:]), self.members, self._exchange, self._places)

    def _exchange(self, mine: bytes) -> bytes:
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        got = torch.empty(len(mine) * len(self.members), dtype=torch.uint8)
        self._recorder.waiting = self
        self._wait_in_slices(self._side._allgather_base(got, sent))
        self._recorder.waiting = None
        return got.numpy().tobytes()
