"""A pool of warm processes: a test over gloo costs milliseconds instead of an interpreter start."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
from tpcore.settings import changed, of_rank

_PRELOAD = ["torch", "torch.distributed", "cloudpickle", "tpcore", "rank_pool"]


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
        self._runs = 0

    def run(
        self,
        mesh: Mesh,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run ``fn(ctx, *args)`` on every rank of ``mesh``. Returns the results in rank order.

        Raises the first error that is not the consequence of another rank's. ``timeout``: seconds that a
        collective may wait. ``env``: variables for this run.
        """
        outcomes = self.outcomes(mesh, fn, *args, timeout=timeout, env=env)
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
    ) -> list[Outcome]:
        """Like ``run``, but returns every rank's outcome. A killed rank's error is PeerLostError.

        Raises RankStuck if a rank gave no answer: nothing that the others say of it is an outcome.
        """
        outcomes = self._outcomes(self._job(mesh, timeout, self.meeting_point() | dict(env or {})), fn, args)
        for outcome in outcomes:
            if isinstance(outcome.error, RankStuck):
                raise outcome.error
        return outcomes

    def standing(self, size: int, *, timeout: float = 60.0, env: Mapping[str, str] | None = None) -> Standing:
        """One job for many runs on the first ``size`` processes. Each run's mesh has ``size`` ranks."""
        return Standing(self, size, timeout, dict(env or {}))

    def meeting_point(self) -> dict[str, str]:
        """Environment variables for the rendezvous of a new job."""
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        return self._class.job(folder)

    def _job(self, mesh: Mesh, timeout: float, variables: Mapping[str, str], name: str = "") -> _Job:
        if mesh.size > self.size:
            raise ValueError(f"mesh {dict(mesh.axes)} has {mesh.size} ranks, the pool {self.size} processes")
        return _Job(dict(mesh.axes), timeout, dict(variables), name)

    def _outcomes(self, job: _Job, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Outcome]:
        call, size = pack_call(fn, args, {"backend": self._backend}), Mesh(job.axes).size
        for rank, worker in enumerate(self._workers[:size]):
            worker.conn.send((rank, job, call))
        return self._collect(size, time.monotonic() + job.timeout + self._grace)

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
        return _Worker(self._folder / f"stacks{number}", self._class.__module__)

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


class Standing:
    """A job whose ranks stay connected between runs, so that a run costs milliseconds. A failed run ends the
    job, and so does another run of the pool on the same processes. The next run begins a new job."""

    def __init__(self, pool: RankPool, size: int, timeout: float, env: dict[str, str]) -> None:
        self._pool, self._size, self._timeout, self._env = pool, size, timeout, env
        self._variables: dict[str, str] | None = None
        self._name = ""

    def run(self, mesh: Mesh, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Like ``RankPool.run``."""
        if mesh.size != self._size:
            raise ValueError(f"mesh {dict(mesh.axes)} has {mesh.size} ranks, the job {self._size}")
        if self._variables is None:
            self._variables, self._name = self._pool.meeting_point() | self._env, uuid.uuid4().hex
        pool = self._pool
        outcomes = pool._outcomes(pool._job(mesh, self._timeout, self._variables, self._name), fn, args)
        error = root_cause(outcomes)
        if error is not None:
            self._variables = None
            raise error
        return [o.value for o in outcomes]


class _Job(NamedTuple):
    """The job that a rank joins. ``name``: of a ``Standing`` job; empty for a job that ends with its run."""

    axes: dict[str, int]
    timeout: float
    variables: dict[str, str]
    name: str


class _Worker:
    """The pool's side of one process."""

    def __init__(self, stacks: Path, module: str) -> None:
        # forkserver rather than spawn: forks of a single-threaded server with torch start a second sooner
        methods = get_context("forkserver")
        methods.set_forkserver_preload([*_PRELOAD, module])
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
        deadline = time.monotonic() + 2.0
        while not self._stacks.stat().st_size and time.monotonic() < deadline:
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
    ranks = _Ranks()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                rank, job, call = conn.recv()
            except EOFError:
                return
            entered: list[bool] = []
            outcome = outcome_of(lambda: ranks.run(rank, job, call, entered))  # noqa: B023  called at once
            # a process group that failed to form leaves torch.distributed unusable: not reusable then
            conn.send((bool(entered), pack_outcome(outcome, rank)))


class _Ranks:
    """This process as a rank of one job after the other."""

    def __init__(self) -> None:
        self._standing: tuple[str, Backend] | None = None
        self._contexts: dict[tuple[tuple[str, int], ...], ParallelContext] = {}

    def run(self, rank: int, job: _Job, call: bytes, entered: list[bool]) -> Any:
        fn, args, chosen = unpack_call(call)
        mesh = Mesh(job.axes)
        with changed(of_rank(rank, mesh.size) | job.variables):
            backend = self._joined(job, chosen["backend"])
            entered.append(True)
            try:
                context = self._contexts.setdefault(tuple(job.axes.items()), ParallelContext(backend, mesh, rank))
                with use(context) as ctx:
                    found = fn(ctx, *args)
            except BaseException:
                self._leave(backend)
                raise
            if not job.name:
                self._leave(backend)
            return found

    def _joined(self, job: _Job, chosen: str | type[Backend]) -> Backend:
        if self._standing is not None:
            name, backend = self._standing
            if name == job.name:
                return backend
            self._leave(backend)
        backend = _class_of(chosen)()
        backend.start(job.timeout)
        if job.name:
            self._standing = job.name, backend
        return backend

    def _leave(self, backend: Backend) -> None:
        self._standing = None
        self._contexts.clear()
        backend.stop()


def _class_of(backend: str | type[Backend]) -> type[Backend]:
    return backend_class(backend) if isinstance(backend, str) else backend
