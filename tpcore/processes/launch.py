"""Starting the ranks of a job from Python, on torch's own elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .transfer import Outcome, death, module_command, pack_call, root_cause, unpack_outcome

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(
    fn: Callable[..., Any],
    nprocs: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``fn(*args, **kwargs)`` in ``nprocs`` new processes of this machine; the results in rank order.

    ``fn`` calls ``tpcore.init(tp=...)`` itself. The processes are fresh interpreters: nothing of this one
    is inherited but its environment, its import path and what ``fn`` refers to. A script needs no
    ``if __name__ == "__main__"`` and a notebook works; both need cloudpickle.

    ``timeout``: seconds that a collective may wait, as of ``init``. ``env``: variables for the processes.

    If ranks fail, all are ended and the error that came first, and is not the consequence of another, is
    raised here, with its traceback from there as the cause; PeerLostError if a rank died without one.
    """
    if not callable(fn):
        raise TypeError(f"launch needs a function, not {fn!r}")
    if not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs must be a whole number of processes, 1 or more, not {nprocs!r}")
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if timeout is not None:
        variables["TPCORE_TIMEOUT"] = str(float(timeout))
    call = pack_call(fn, tuple(args), dict(kwargs or {}))
    with TemporaryDirectory(prefix="tpcore-launch-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(call)
        died = _run(folder, nprocs, variables | dict(env or {}))
        outcomes = [_outcome(folder, rank, died) for rank in range(nprocs)]
    error = root_cause(outcomes)
    if error is not None:
        raise error
    return [outcome.value for outcome in outcomes]


def _run(folder: Path, nprocs: int, variables: Mapping[str, str]) -> dict[int, int]:
    """Run the ranks to their end; the exit codes of those that made the launcher give up."""
    (folder / "logs").mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nprocs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    # env and not a change of this process's environment, which other threads may be reading
    command = ["env", *(f"{k}={v}" for k, v in variables.items()), *module_command("tpcore.processes.child")]
    try:
        with _as_before(), _quiet():
            elastic_launch(config, command[0])(*command[1:], str(folder), str(os.getpid()))
    except ChildFailedError as e:
        codes = {rank: failure.exitcode for rank, failure in e.failures.items()}
        # the agent ends the others with SIGTERM and counts them too
        return {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
    except SignalException as e:
        if e.sigval is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + e.sigval) from None
    return {}


def _outcome(folder: Path, rank: int, died: Mapping[int, int]) -> Outcome:
    path = folder / str(rank)
    if path.exists():
        return unpack_outcome(path.read_bytes())
    if rank not in died:
        return Outcome()  # ended by the launcher, because of another rank
    return Outcome(error=death(rank, died[rank]))


@contextmanager
def _as_before() -> Iterator[None]:
    """Give back the signal handlers that the elastic agent replaces and keeps."""
    if threading.current_thread() is not threading.main_thread():
        yield  # there it replaces none
        return
    handlers = {s: signal.getsignal(s) for s in _SIGNALS}
    try:
        yield
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent's own account of a failure says less than the error that is raised."""
    loggers = [logging.getLogger(n) for n in ("torch.distributed.elastic", "torchelastic-events-null")]
    before = [logger.propagate for logger in loggers]
    nowhere = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(nowhere)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(nowhere)
