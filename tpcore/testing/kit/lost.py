"""The conformance kit's check of lost ranks: jobs of its own, in each of which one rank is lost. The ranks are forks
of one process that has imported the backend, and start in hundredths of a second."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import closing, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import settings
from ...backend.interface import Backend
from ...comm.comm import Comm
from ...comm.signature import ALL, checked_calls
from ...errors import CollectiveTimeoutError, PeerLostError
from ...processes.launch import Processes, follow
from ...runtime.context import ParallelContext, in_eager_mode
from ...runtime.init import init
from .collectives import METHODS, calls
from .launched import told
from .rank import Wrong, differs

_SHORT, _LOADED = 12, 8
"""A collective of these jobs may wait a twelfth of the kit's time-out; on a machine with other work up to eight times
as long."""
WAYS: Mapping[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "gone": lambda: os._exit(0),
    "late": lambda: time.sleep(1e6),
}
"""What becomes of the lost rank."""
_RIGHT = "PeerLostError or CollectiveTimeoutError"
_FORK = get_context("fork")


class Losses(NamedTuple):
    """The jobs to start. ``timeout``: the kit's; their ranks start in it, and have the error a third of it after their
    own time-out."""

    kind: type[Backend]
    timeout: float = 60.0
    ways: Sequence[str] = tuple(WAYS)
    methods: Sequence[str] = METHODS


def lost(ctx: ParallelContext, plan: Losses) -> Wrong:
    """Every rank that waits for a lost one gets an error that says so, in each method. Each way loses another rank."""
    with ThreadPoolExecutor(1) as aside:
        begun = aside.submit(_found, plan) if ctx.rank == 0 else None
        over: list[str] = []
        # the others wait while the first has these jobs, as long as this machine takes for them, and never long in
        # one collective: its time-out would end this job, and all tests that follow
        while not over:
            ended = begun is not None and wait_for([begun], plan.timeout / _SHORT).done
            over = told(["over"] if ended else [], ctx.world)[0]
        return Wrong() if begun is None else begun.result()


vars(lost)["timeouts"] = 2 * len(WAYS)  # in the worst case: they start, and have the error, late


def _found(plan: Losses) -> Wrong:
    with tempfile.TemporaryDirectory() as name, closing(Processes()) as processes:
        folder = Path(name)
        (folder / "plan").write_bytes(pickle.dumps(plan))
        log = folder / "log"
        status = processes.start(__name__, [name], environment=settings.inherited(), log=log).wait()
        if status:
            return Wrong([f"the process that starts ranks ended with status {status}:\n{_end(log)}"])
        return Wrong(pickle.loads((folder / "findings").read_bytes()))


class _JobRank:
    """A process of a job that loses rank ``lost`` in a call of ``method``, and what it ``said`` after two calls."""

    def __init__(self, plan: Losses, way: str, method: str, lost: int, number: int) -> None:
        self.way, self.method, self.lost, self.number = way, method, lost, number
        self.said: list[str] = []
        self._kind = plan.kind

    def start(self, job: Mapping[str, str], size: int, timeout: float, lifeline: int) -> None:
        self.heard, told = _FORK.Pipe(duplex=False)
        job = {**job, **settings.of_rank(self.number, size)}
        self.process = _FORK.Process(target=self._run, args=(job, size, timeout, lifeline, told), daemon=True)
        self.process.start()
        told.close()

    def _run(self, job: Mapping[str, str], size: int, timeout: float, lifeline: int, told: Connection) -> None:
        follow(lifeline)
        settings.update(job)
        ctx = init(backend=self._kind(), tp=size, timeout=timeout)
        call, want, depends = self._call(ctx.comm("tp"), ctx.device)
        call()
        if self.number == self.lost:
            WAYS[self.way]()
        told.send("")
        told.send(_outcome(call, want, depends))
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

    def finding(self, timeout: float) -> str:
        """What is wrong with what it said of its second call; empty if nothing is."""
        if self.said[1:]:
            return f"{self.said[1]}: it has to get {_RIGHT}" if self.said[1] else ""
        status = self.process.exitcode
        what = "waits for ever" if status is None else f"ended with status {status}"
        return f"{what}: start(timeout={timeout:g}) promises {_RIGHT}"


def _outcome(call: Callable[[], Tensor], want: Tensor, depends: bool) -> str:
    try:
        got = call()
        return f"got {got.tolist()} from it" if depends or differs(got, want) else ""
    except (PeerLostError, CollectiveTimeoutError) as e:
        return "" if str(e) else f"got an {type(e).__name__} without a message"
    except Exception as e:  # noqa: BLE001  any error but the right one is a finding
        return f"got {type(e).__name__}: {e}"


def _findings(plan: Losses, way: str, lifeline: int, timeout: float, log: Path) -> list[str]:
    """Of one job for each method, in all of which a rank is lost in one way."""
    size = 2 if plan.kind.capabilities.misfit({"tp": 3}) else 3
    ranks: list[_JobRank] = []
    try:
        for method in plan.methods:
            where = (list(WAYS).index(way) + METHODS.index(method)) % size
            with socket.create_server(("127.0.0.1", 0)) as taken:  # free now; others may take it until it is used
                job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
            for number in range(size):
                ranks.append(_JobRank(plan, way, method, where, number))
                ranks[-1].start(job, size, timeout, lifeline)
        left = [r for r in ranks if r.number != r.lost]
        _wait(left, 1, plan.timeout, lifeline)
        for rank in (r for r in left if not r.said):
            status, end, early = rank.process.exitcode, f"in {plan.timeout:g} s", ""
            if status is not None:
                end = f"and rank {rank.number} ended with status {status}"
                early = f"; or rank {rank.lost} was done, and lost, before the others had what it holds for them"
            return [
                f"{size} processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set made no {rank.method} {end}: "
                f"set starts = False if a launcher has to start them{early}\n{_end(log)}"
            ]
        _wait(left, 2, timeout + plan.timeout / 3, lifeline)
        findings = [(r, r.finding(timeout)) for r in left]
        return [f"rank {r.lost} is {r.way} in {r.method}, and rank {r.number} {f}" for r, f in findings if f]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def _wait(ranks: Sequence[_JobRank], count: int, seconds: float, lifeline: int) -> None:
    """Until each has said ``count`` things, or has ended."""
    until = time.monotonic() + seconds
    while waited := [r for r in ranks if len(r.said) < count and r.process.exitcode is None]:
        ready = wait([*(r.heard for r in waited), lifeline], max(0.0, until - time.monotonic()))
        if lifeline in ready:
            os._exit(1)  # the kit's process has ended, and the ranks end as this one does
        if not ready:
            return
        for rank in (r for r in waited if r.heard in ready):
            try:
                rank.said.append(rank.heard.recv())
            except EOFError:
                rank.process.join()


def _end(log: Path) -> str:
    return log.read_text()[-4000:]


def main(lifeline: str, name: str) -> None:
    torch.set_num_threads(1)
    folder, findings = Path(name), list[str]()
    plan: Losses = pickle.loads((folder / "plan").read_bytes())
    # a rank that others keep from its first call is not lost: other work, and the three processes of each job here,
    # which mostly wait
    busy = os.getloadavg()[0] + len(plan.methods) / 2
    timeout = plan.timeout / _SHORT * min(_LOADED, max(1.0, busy / (os.cpu_count() or 1)))
    # as each rank enters it: what that imports takes seconds, and here it is for all of them
    with in_eager_mode() if checked_calls() == ALL else nullcontext():
        for way in plan.ways:
            findings += _findings(plan, way, int(lifeline), timeout, folder / "log")
    (folder / "findings").write_bytes(pickle.dumps(findings))


if __name__ == "__main__":
    main(*sys.argv[1:])
