"""A pool of warm processes: a test over gloo costs milliseconds instead of an interpreter start."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import programs as forked
from tpcore.backend.interface import Backend
from tpcore.backend.registry import backend_class
from tpcore.errors import BackendError
from tpcore.layout.mesh import Mesh
from tpcore.processes.launch import follow
from tpcore.processes.transfer import (
    Outcome,
    death,
    outcome_of,
    pack_call,
    pack_outcome,
    root_cause,
    unpack_call,
    unpack_outcome,
)
from tpcore.runtime.context import ParallelContext, use
from tpcore.settings import CHECK, changed, of_rank


class RankStuck(BackendError):
    """A worker did not answer in time. The message contains the stacks of its threads."""


class RankPool:
    """``size`` processes that have imported torch and tpcore, for one run after another.

    A world smaller than the pool uses its first processes. A killed or broken process is replaced.
    ``grace``: seconds that a run may take beyond its ``timeout``, or beyond the first rank's error.
    ``backend``: the name of a plugin, or a class whose ``job`` returns the variables for the rendezvous.
    """

    def __init__(self, size: int, grace: float = 15.0, backend: str | type[Backend] = "cpu_gloo") -> None:
        self.size, self._grace, self._backend = size, grace, backend
        self._class = _class_of(backend)
        self._files = tempfile.TemporaryDirectory(prefix="tpcore-pool-")
        self._workers = [self._worker(i) for i in range(size)]
        self._jobs = itertools.count()
        self._standing: _Job | None = None

    def run(self, mesh: Mesh, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run ``fn(ctx, *args)`` on every rank of ``mesh``. Returns the results in rank order.

        Raises the first error that is not the consequence of another rank's. ``options``: as of ``outcomes``.
        """
        outcomes = self.outcomes(mesh, fn, *args, **options)
        error = root_cause(outcomes)
        if error is not None:
            raise error
        return [o.value for o in outcomes]

    def outcomes(
        self,
        mesh: Mesh,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        stay: bool = False,
    ) -> list[Outcome]:
        """Like ``run``, but returns every rank's outcome. A killed rank's error is PeerLostError.

        ``timeout``: seconds that a collective may wait. ``env``: variables for this run. ``stay``: the ranks stay
        connected, so that the next such run, with as many ranks, costs milliseconds; it has the same time-out and
        variables. A failed run ends their job, and so does another run of the pool.

        Raises RankStuck if a rank gave no answer: nothing that the others say of it is an outcome.
        """
        if mesh.size > self.size:
            raise ValueError(f"mesh {dict(mesh.axes)} has {mesh.size} ranks, the pool {self.size} processes")
        # a process of a fork server has the environment of the test that started that
        variables = ({CHECK.name: CHECK.text()} if CHECK.is_set else {}) | dict(env or {})
        job = self._standing
        if not stay or job is None or job.size != mesh.size:
            job = self._job(mesh.size, timeout, variables, stay)
        elif (job.timeout, job.env) != (timeout, variables):
            raise ValueError(f"the ranks that stay have timeout={job.timeout:g} and env={job.env} in all their runs")
        self._standing = None
        call = pack_call(fn, args, {"backend": self._backend})
        for rank, worker in enumerate(self._workers[: mesh.size]):
            worker.conn.send((rank, dict(mesh.axes), job, call))
        outcomes = self._collect(mesh.size, time.monotonic() + timeout + self._grace)
        for outcome in outcomes:
            if isinstance(outcome.error, RankStuck):
                raise outcome.error
        if stay and root_cause(outcomes) is None:
            self._standing = job
        return outcomes

    def _job(self, size: int, timeout: float, env: dict[str, str], stay: bool) -> _Job:
        number = next(self._jobs)
        folder = self._folder / f"run{number}"
        folder.mkdir()
        return _Job(number, size, timeout, env, self._class.job(folder), stay)

    def pids(self) -> list[int]:
        return [w.process.pid or 0 for w in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._files.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _folder(self) -> Path:
        return Path(self._files.name)

    def _worker(self, number: int) -> _Worker:
        return _Worker(self._folder / f"stacks{number}")

    def _collect(self, world: int, deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < world:
            handles = {self._workers[r].conn: r for r in range(world) if r not in outcomes}
            ready = wait(list(handles), timeout=max(0.0, deadline - time.monotonic()))
            for conn in ready:
                rank = handles[conn]  # type: ignore[index]  # wait() returns a wider type than it was given
                outcomes[rank] = self._workers[rank].answer(rank)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + self._grace)
            if not ready:
                stuck = {r: Outcome(error=self._workers[r].stuck(r)) for r in handles.values()}
                outcomes |= stuck
        for rank, outcome in outcomes.items():
            if outcome.error is not None and not self._workers[rank].reusable:
                self._workers[rank].close()
                self._workers[rank] = self._worker(rank)
        return [outcomes[r] for r in range(world)]


class _Job(NamedTuple):
    """The job that a rank joins. ``stay``: it does not end with its run."""

    number: int
    size: int
    timeout: float
    env: dict[str, str]
    meeting_point: dict[str, str]
    stay: bool


class _Worker:
    """The pool's side of one process."""

    def __init__(self, stacks: Path) -> None:
        methods = forked.context()
        self.conn, theirs = methods.Pipe()
        lifeline, self._lifeline = methods.Pipe(duplex=False)
        self.reusable = True
        self._stacks = stacks
        self.process: BaseProcess = methods.Process(target=_serve, args=(theirs, lifeline, str(stacks)), daemon=True)
        self.process.start()
        theirs.close()
        lifeline.close()

    def answer(self, rank: int) -> Outcome:
        try:
            self.reusable, packed = self.conn.recv()
            return unpack_outcome(packed)
        except (EOFError, ConnectionResetError):
            self.reusable = False
            self.process.join()
        return Outcome(error=death(rank, self.process.exitcode or 0))

    def stuck(self, rank: int) -> RankStuck:
        self.reusable = False
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        seen, deadline = -1, time.monotonic() + 2.0
        # written in pieces
        while (not (size := self._stacks.stat().st_size) or size != seen) and time.monotonic() < deadline:
            seen = size
            time.sleep(0.01)
        return RankStuck(f"rank {rank} gave no answer in time. Its threads:\n{self._stacks.read_text()}")

    def close(self) -> None:
        self.conn.close()
        self.process.kill()
        self.process.join()
        self._lifeline.close()


def _serve(conn: Connection, lifeline: Connection, stacks: str) -> None:
    follow(lifeline.fileno())
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported is no garbage
    process = _RankProcess()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                message = conn.recv()
            except EOFError:
                return
            entered: list[bool] = []
            outcome = outcome_of(partial(process.run, entered, *message))
            # a process group that failed to form leaves torch.distributed unusable: not reusable then
            conn.send((bool(entered), pack_outcome(outcome, message[0])))


class _RankProcess:
    """This process as a rank of one job after the other."""

    def __init__(self) -> None:
        self._joined: tuple[int, Backend] | None = None
        self._contexts: dict[tuple[tuple[str, int], ...], ParallelContext] = {}

    def run(self, entered: list[bool], rank: int, axes: Mapping[str, int], job: _Job, call: bytes) -> Any:
        fn, args, chosen = unpack_call(call)
        mesh = Mesh(axes)
        with changed(of_rank(rank, mesh.size) | job.meeting_point | job.env):
            backend = self._join(job, chosen["backend"])
            entered.append(True)
            try:
                context = self._contexts.setdefault(tuple(axes.items()), ParallelContext(backend, mesh, rank))
                with use(context) as ctx:
                    found = fn(ctx, *args)
            except BaseException:
                self._leave()
                raise
            if not job.stay:
                self._leave()
            return found

    def _join(self, job: _Job, chosen: str | type[Backend]) -> Backend:
        if self._joined is None or self._joined[0] != job.number:
            self._leave()
            backend = _class_of(chosen)()
            backend.start(job.timeout)
            self._joined = job.number, backend
        return self._joined[1]

    def _leave(self) -> None:
        left, self._joined = self._joined, None
        self._contexts.clear()
        if left is not None:
            left[1].stop()


def _class_of(backend: str | type[Backend]) -> type[Backend]:
    return backend_class(backend) if isinstance(backend, str) else backend
