"""A warm pool of real processes, so that a test over gloo costs milliseconds and not an interpreter start."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from ..backend.interface import Backend
from ..backend.registry import backend_class
from ..context import ParallelContext, use
from ..errors import BackendError
from ..mesh import Mesh
from ..settings import changed, of_rank
from .lifeline import follow
from .transfer import (
    Outcome,
    death,
    outcome_of,
    pack_call,
    pack_outcome,
    root_cause,
    unpack_call,
    unpack_outcome,
)

_PRELOAD = ["torch", "torch.distributed", "cloudpickle", "tpcore", "tpcore.processes.pool"]


class RankStuck(BackendError):
    """A worker gave no answer in time. The message holds its stacks."""


class RankPool:
    """``size`` processes with torch and tpcore imported, for one run after another.

    A world smaller than the pool uses its first processes. One that was killed or left broken is replaced.
    ``grace``: seconds that a run may take beyond its ``timeout``, or beyond the first rank's error.
    ``backend``: the name of a plugin, or a class whose ``job`` tells the ranks where to meet.
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
        """``fn(ctx, *args)`` on every rank of ``mesh`` over gloo; the results in rank order.

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
        """As ``run``, but how every rank ended: PeerLostError for one that was killed."""
        if mesh.size > self.size:
            raise ValueError(f"mesh {dict(mesh.axes)} has {mesh.size} ranks, the pool {self.size} processes")
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        job = (dict(mesh.axes), timeout, self._class.job(folder) | dict(env or {}))
        call = pack_call(fn, args, {"backend": self._backend})
        for rank, worker in enumerate(self._workers[: mesh.size]):
            worker.conn.send((rank, job, call))
        return self._collect(mesh.size, time.monotonic() + timeout + self._grace)

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
                rank = handles[conn]  # type: ignore[index]  # of the connections that went in
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


class _Worker:
    """One process, as seen from the test."""

    def __init__(self, stacks: Path, module: str) -> None:
        # not by ``spawn``: forks of a single-threaded server that has imported torch start a second sooner
        methods = get_context("forkserver")
        methods.set_forkserver_preload([*_PRELOAD, module])
        self.conn, theirs = methods.Pipe()
        lifeline, self._lifeline = methods.Pipe(duplex=False)
        self.reusable = True
        self._stacks = stacks
        self.process: BaseProcess = methods.Process(
            target=_serve, args=(theirs, lifeline, str(stacks)), daemon=True
        )
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
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                rank, job, call = conn.recv()
            except EOFError:
                return
            entered: list[bool] = []
            outcome = outcome_of(lambda: _run(rank, job, call, entered))  # noqa: B023  called at once
            # a group that did not come about leaves traces in torch.distributed that no later one survives
            conn.send((bool(entered), pack_outcome(outcome, rank)))


def _run(rank: int, job: tuple[Any, ...], call: bytes, entered: list[bool]) -> Any:
    axes, timeout, variables = job
    fn, args, chosen = unpack_call(call)
    mesh = Mesh(axes)
    with changed(of_rank(rank, mesh.size) | variables):
        backend = _class_of(chosen["backend"])()
        backend.start(timeout)
        entered.append(True)
        try:
            with use(ParallelContext(backend, mesh, rank)) as ctx:
                return fn(ctx, *args)
        finally:
            backend.stop()


def _class_of(backend: str | type[Backend]) -> type[Backend]:
    return backend_class(backend) if isinstance(backend, str) else backend
