"""The conformance kit's check of lost ranks: jobs of its own, in each of which one rank is lost.

The first process of the kit starts a process that imports the backend. Its forks are the ranks of these jobs:
a rank starts in hundredths of a second, and not in the seconds that imports take.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ... import settings
from ...backend.interface import Backend
from ...comm.comm import Comm
from ...errors import CollectiveTimeoutError, PeerLostError
from ...processes.spawn import Processes, follow
from ...runtime.context import ParallelContext
from ...runtime.init import init
from .collectives import METHODS, Wrong, calls, differs

TIMEOUT = 5.0
"""Seconds that a collective of these jobs may wait, on a machine that has nothing else to do."""
WAYS: Mapping[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "gone": lambda: os._exit(0),
    "late": lambda: time.sleep(1e6),
}
"""What becomes of the lost rank."""
_RIGHT = "PeerLostError or CollectiveTimeoutError"


class Losses(NamedTuple):
    """The jobs to start, in each of which a rank is lost. ``patience``: seconds for their ranks to start.
    ``slack``: seconds for the error, beyond the time-out."""

    kind: type[Backend]
    patience: float
    slack: float = 20.0
    ways: Sequence[str] = tuple(WAYS)
    methods: Sequence[str] = METHODS


def lost(ctx: ParallelContext, plan: Losses) -> Wrong:
    """Every rank that waits for a lost one gets an error that says so, in each method. Each way has another
    rank lost in a method, so that in all ways together it is each of them."""
    if ctx.rank:
        return Wrong()
    with tempfile.TemporaryDirectory() as name, closing(Processes()) as processes:
        folder = Path(name)
        (folder / "plan").write_bytes(pickle.dumps(plan))
        log = folder / "log"
        status = processes.start(__name__, [name], environment=settings.inherited(), log=log).wait()
        if status:
            return Wrong([f"the process that starts ranks ended with status {status}:\n{_end(log)}"])
        return Wrong(pickle.loads((folder / "findings").read_bytes()))


class _Fork(NamedTuple):
    """One process of a job in which rank ``lost`` is lost in a call of ``method``."""

    folder: Path
    way: str
    method: str
    lost: int
    number: int
    timeout: float

    def wrote(self, name: str) -> Path:
        return self.folder / f"{self.way} {self.method} {self.number} {name}"

    def run(self, kind: type[Backend], size: int) -> None:
        ctx = init(backend=kind(), tp=size, timeout=self.timeout)
        call, want, depends = self._call(ctx.comm("tp"), ctx.device)
        call()
        if self.number == self.lost:
            WAYS[self.way]()
        self._write("begun", "")
        self._write("end", _outcome(call, want, depends))
        time.sleep(1e6)  # a rank that ends now would be another lost one

    def _call(self, comm: Comm, device: torch.device) -> tuple[Callable[[], Tensor], Tensor, bool]:
        """A call, its right result, and whether that depends on what the lost rank sends."""
        every = [torch.full((2 * comm.size,), p + 1.0) for p in range(comm.size)]
        at = self.lost if self.method == "broadcast" else 0  # its calls differ in the rank that sends
        _, call, want = calls(comm, self.method, every)[at]
        x = every[self.number].to(device)
        every[self.lost] = torch.zeros_like(x.cpu())
        without = calls(comm, self.method, every)[at][2]
        return lambda: call(x), want, bool(differs(without, want))

    def _write(self, name: str, text: str) -> None:
        made = self.wrote(f".{name}")
        made.write_text(text)
        made.rename(self.wrote(name))


def _outcome(call: Callable[[], Tensor], want: Tensor, depends: bool) -> str:
    try:
        got = call()
        return f"got {got.tolist()} from it" if depends or differs(got, want) else ""
    except (PeerLostError, CollectiveTimeoutError) as e:
        return "" if str(e) else f"got an {type(e).__name__} without a message"
    except Exception as e:  # noqa: BLE001  any error but the right one is a finding
        return f"got {type(e).__name__}: {e}"


class _Jobs:
    """One job for each method, in all of which a rank is lost in one way."""

    def __init__(self, plan: Losses, way: str, folder: Path, lifeline: int, timeout: float) -> None:
        self._plan, self._folder, self._lifeline, self._timeout = plan, folder, lifeline, timeout
        self._size = 2 if plan.kind.capabilities.misfit({"tp": 3}) else 3
        self._statuses: dict[_Fork, int] = {}
        self._running: dict[int, _Fork] = {}
        first = list(WAYS).index(way)
        for method in plan.methods:
            where = (first + METHODS.index(method)) % self._size
            self._start([_Fork(folder, way, method, where, n, timeout) for n in range(self._size)])
        self._left = [r for r in self._running.values() if r.number != r.lost]

    def _start(self, ranks: Sequence[_Fork]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        for rank in ranks:
            pid = os.fork()
            if not pid:
                settings.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
                settings.update(settings.of_rank(rank.number, self._size))
                _forked(rank, self._plan.kind, self._size, self._lifeline)
            self._running[pid] = rank

    def findings(self) -> list[str]:
        try:
            self._wait("begun", self._plan.patience)
            for rank in (r for r in self._left if not r.wrote("begun").exists()):
                status = self._statuses.get(rank)
                end = f"in {self._plan.patience:g} s"
                if status is not None:
                    end = f"and rank {rank.number} ended with status {status}"
                return [
                    f"{self._size} processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set made no "
                    f"{rank.method} {end}: set starts = False if a launcher has to start them\n"
                    f"{_end(self._folder / 'log')}"
                ]
            self._wait("end", self._timeout + self._plan.slack)
            found = [(r, self._finding(r)) for r in self._left]
            return [f"rank {r.lost} is {r.way} in {r.method}, and rank {r.number} {f}" for r, f in found if f]
        finally:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _finding(self, rank: _Fork) -> str:
        if rank.wrote("end").exists():
            said = rank.wrote("end").read_text()
            return f"{said}: it has to get {_RIGHT}" if said else ""
        status = self._statuses.get(rank)
        what = "waits for ever" if status is None else f"ended with status {status}"
        return f"{what}: start(timeout={self._timeout:g}) promises {_RIGHT}"

    def _wait(self, name: str, seconds: float) -> None:
        """Until all ranks that are not lost have written ``name``, or one of them has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    self._statuses[self._running.pop(ended[0])] = os.waitstatus_to_exitcode(ended[1])
            if all(r in self._statuses or r.wrote(name).exists() for r in self._left):
                return
            if select.select([self._lifeline], [], [], 0.02)[0]:
                os._exit(1)  # the kit's process has ended, and the ranks end as this one does


def _forked(rank: _Fork, kind: type[Backend], size: int, lifeline: int) -> NoReturn:
    status = 1
    try:
        follow(lifeline)
        rank.run(kind, size)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    except BaseException:  # noqa: BLE001  nothing may return into the process that forks
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end(log: Path) -> str:
    return log.read_text()[-4000:]


def main(lifeline: str, name: str) -> None:
    torch.set_num_threads(1)
    folder, found = Path(name), []
    plan: Losses = pickle.loads((folder / "plan").read_bytes())
    # measured before these jobs add to it: a rank that other work keeps from its first call is not lost
    timeout = TIMEOUT * min(8.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    for way in plan.ways:
        found += _Jobs(plan, way, folder, int(lifeline), timeout).findings()
    (folder / "findings").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
