"""A warm pool of real processes, so that a test over gloo costs milliseconds and not an interpreter start."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from ..context import ParallelContext, use
from ..errors import BackendError, PeerLostError
from ..mesh import Mesh

_PRELOAD = ["torch", "torch.distributed", "cloudpickle", "tpcore", "tpcore.testing.pool", "tpcore_cpu_gloo"]


class RankDied(BackendError):
    """A worker process ended without an answer."""


class RankTimeout(BackendError):
    """A worker gave no answer in time; the message holds its stacks."""


class RankErrors(BackendError):
    """Several ranks failed. ``errors`` in rank order, None for a rank that did not."""

    def __init__(self, message: str, errors: list[BaseException | None]) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True)
class Outcome:
    """How ``fn`` ended on one rank: a value, or an error with the remote traceback in its notes."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


class _Worker:
    def __init__(self) -> None:
        methods = get_context("forkserver")  # forks of a single-threaded server that has imported torch
        methods.set_forkserver_preload(_PRELOAD)
        self.conn, theirs = methods.Pipe()
        self.stacks = Path(tempfile.mkstemp(prefix="tpcore-stacks-")[1])
        self.process: BaseProcess = methods.Process(target=_serve, args=(theirs, str(self.stacks)), daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        self.conn.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.stacks.unlink(missing_ok=True)


class RankPool:
    """``size`` processes with torch and tpcore imported, used again and again."""

    def __init__(self, size: int) -> None:
        import torch.distributed as dist  # noqa: TID251  the store that joins the ranks of a run

        self.size = size
        self._workers = [_Worker() for _ in range(size)]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs = 0

    def run(
        self,
        mesh: Mesh,
        fn: Callable[..., Any],
        *args: Any,
        backend: str = "cpu_gloo",
        timeout: float = 60.0,
        raises: bool = True,
    ) -> list[Any]:
        """``fn(ctx, *args)`` on every rank of ``mesh``; the results in rank order.

        ``timeout``: seconds that a collective may wait, and (with some grace) the whole run. The root
        cause of a failure is raised; ``raises=False`` returns an Outcome per rank instead.
        """
        if mesh.size > self.size:
            raise ValueError(f"mesh {dict(mesh.axes)} has {mesh.size} ranks and the pool {self.size} workers")
        self._runs += 1
        workers = self._workers[: mesh.size]
        job = cloudpickle.dumps((dict(mesh.axes), fn, args, backend, timeout, self._store.port, self._runs))
        for rank, worker in enumerate(workers):
            worker.conn.send((rank, sys.path, job))
        outcomes = self._collect(workers, timeout + 10.0)
        if not raises:
            return outcomes
        errors = [o.error for o in outcomes]
        failed = [e for e in errors if e is not None]
        if failed:
            cause = min(failed, key=lambda e: isinstance(e, PeerLostError))
            cause.rank_errors = errors  # type: ignore[attr-defined]
            raise cause
        return [o.value for o in outcomes]

    def _collect(self, workers: list[_Worker], seconds: float) -> list[Outcome]:
        outcomes: dict[_Worker, Outcome] = {}
        deadline = time.monotonic() + seconds
        while len(outcomes) < len(workers):
            open_ = [w for w in workers if w not in outcomes]
            handles = [h for w in open_ for h in (w.conn, w.process.sentinel)]
            ready = wait(handles, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for w in open_:
                    outcomes[w] = Outcome(error=self._stuck(workers.index(w), w, seconds))
                break
            for w in open_:
                if w.conn in ready:
                    outcomes[w] = self._receive(workers.index(w), w)
                elif w.process.sentinel in ready:
                    outcomes[w] = self._receive(workers.index(w), w) if w.conn.poll() else self._died(workers.index(w), w)
        for w in workers:
            if isinstance(outcomes[w].error, (RankDied, RankTimeout)):
                self._replace(w)
        return [outcomes[w] for w in workers]

    def _receive(self, rank: int, w: _Worker) -> Outcome:
        try:
            outcome: Outcome = cloudpickle.loads(w.conn.recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._died(rank, w)
        return outcome

    def _died(self, rank: int, w: _Worker) -> Outcome:
        w.process.join()
        code = w.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return Outcome(error=RankDied(f"rank {rank} {how}"))

    def _stuck(self, rank: int, w: _Worker, seconds: float) -> RankTimeout:
        assert w.process.pid
        os.kill(w.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while not w.stacks.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        return RankTimeout(f"rank {rank} gave no answer in {seconds:g} s\n{w.stacks.read_text()}")

    def _replace(self, w: _Worker) -> None:
        w.close()
        self._workers[self._workers.index(w)] = _Worker()

    def close(self) -> None:
        for w in self._workers:
            w.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(conn: Connection, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        while True:
            try:
                rank, path, job = conn.recv()
            except EOFError:
                return
            sys.path[:] = path
            started = time.monotonic()
            try:
                outcome = Outcome(value=_run(rank, job))
            except BaseException as e:  # noqa: BLE001  carried to the test
                outcome = Outcome(error=_noted(e, rank))
            conn.send_bytes(_dump(Outcome(outcome.value, outcome.error, time.monotonic() - started)))


def _run(rank: int, job: bytes) -> Any:
    import torch.distributed as dist  # noqa: TID251
    from tpcore_cpu_gloo import GlooBackend

    axes, fn, args, _, timeout, port, run = cloudpickle.loads(job)
    mesh = Mesh(axes)
    store = dist.PrefixStore(f"run{run}", dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=timeout)))
    backend = GlooBackend(store, rank, mesh.size)
    backend.start(timeout)
    try:
        with use(ParallelContext(backend, mesh, rank)) as ctx:
            return fn(ctx, *args)
    finally:
        backend.stop()


def _noted(error: BaseException, rank: int) -> BaseException:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if hasattr(error, "add_note"):
        error.add_note(f"on rank {rank}:\n{text}")
    return error


def _dump(outcome: Outcome) -> bytes:
    try:
        data = cloudpickle.dumps(outcome)
        cloudpickle.loads(data)
    except Exception as e:  # noqa: BLE001  an exception or a result that cannot travel
        what = f"{type(e).__name__}: {e}; the outcome was {outcome!r}"
        data = cloudpickle.dumps(Outcome(error=BackendError(f"the outcome of a rank cannot be pickled: {what}")))
    return data
