"""Starts and ends the ranks of a job on this host. Each is a fresh interpreter that runs one module; this one runs a
function of ``launch``, with file descriptors as arguments: LIFELINE CALL RESULT."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from .. import settings
from ..log import inform_of_start, log
from ..runtime.memory import keep_freed_memory
from .transfer import (
    Outcome,
    death,
    interpreter,
    nameless_file,
    outcome_of,
    pack_call,
    pack_outcome,
    read_file,
    root_cause,
    unpack_call,
    unpack_outcome,
    write_file,
)

T = TypeVar("T")

_POLL = 0.02  # seconds between polls of running processes
_GRACE = 2.0  # seconds for the other ranks to fail and report their errors, after the first failure
_PATIENCE = 5.0  # seconds for the ranks' SIGTERM handlers
_SAVING = 30.0  # the same where this process is told to end: ranks may save what they have, as under torchrun
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(
    fn: Callable[..., T],
    nprocs: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` in ``nprocs`` new processes on this machine. Returns results in rank order.

    The processes are fresh interpreters with this one's options, ``sys.argv``, environment, directory and import path,
    and with the objects that ``fn`` refers to. If a rank fails, even after it has returned (a save in the background),
    all ranks are ended. The first error that is not the consequence of another rank's is raised here, with its
    traceback as the cause.

    Args:
        fn: calls ``tpcore.init(tp=...)`` itself. With cloudpickle, it may be defined in a notebook, or in a script
            without ``if __name__ == "__main__"``, which only workers need that ``fn`` starts by spawn or forkserver.
        nprocs: how many processes.
        args: of ``fn``.
        kwargs: of ``fn``.
        timeout: seconds that a collective may wait, as in ``init``.
        env: variables for the processes.

    Raises:
        PeerLostError: a rank died without an error.
    """
    if not callable(fn):
        raise TypeError(f"launch needs a function, not {fn!r}")
    if not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs must be a whole number of processes, 1 or more, not {nprocs!r}")
    variables = {settings.THREADS.name: settings.THREADS.text() or str(settings.THREADS.default)}
    if timeout is not None:
        variables[settings.TIMEOUT.name] = str(float(timeout))
    again = sys.modules.get("__mp_main__", sys)  # in a program another name of its ``__main__``
    own = again.__name__ != "__mp_main__" or again is sys.modules["__main__"]
    if not own and multiprocessing.parent_process() is None:
        why = "launch was called while a worker process of multiprocessing imports the script again"
        raise RuntimeError(f"{why}, for what it defines: put the call under if __name__ == '__main__':")
    outcomes = _run(pack_call(fn, tuple(args), dict(kwargs or {})), nprocs, variables | dict(env or {}))
    if (error := root_cause(outcomes)) is not None:
        raise error
    return [outcome.value for outcome in outcomes]


def _run(call: bytes, nprocs: int, variables: Mapping[str, str]) -> list[Outcome]:
    """Run the ranks to their end. Call and results travel in memory, so a full disk does not matter."""
    from ..c10d.supervision.rendezvous import host_store

    files = [nameless_file() for _ in range(1 + nprocs)]
    processes, patience = Processes(), _PATIENCE
    try:
        write_file(files[0], call)
        inform_of_start(nprocs)
        store, job = host_store()
        with _signals_raise():
            for rank, result in enumerate(files[1:]):
                environment, fds = rank_environment(rank, nprocs, job) | dict(variables), (files[0], result)
                processes.start(__name__, fds, environment=environment, fds=fds)
            codes = processes.join(_GRACE, _PATIENCE)
        del store  # the ranks use it until they end
        return [_outcome(rank, code, read_file(files[1 + rank])) for rank, code in enumerate(codes)]
    except BaseException as e:
        processes.send(signal.SIGTERM)
        patience = _SAVING if isinstance(e, SystemExit) else _PATIENCE
        raise
    finally:
        processes.close(patience)
        for fd in files:
            os.close(fd)


def _outcome(rank: int, code: int | None, packed: bytes) -> Outcome:
    """``code``: None if this process ended it because another rank failed."""
    outcome = unpack_outcome(packed) if packed else Outcome()
    if code is not None and outcome.error is None and (code != 0 or not packed):
        return Outcome(error=death(rank, code))  # also after it had returned
    return outcome


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn signals that would end this process into SystemExit, so that it ends the ranks first."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    replaced = [s for s in _SIGNALS if signal.getsignal(s) is signal.SIG_DFL]
    for s in replaced:
        signal.signal(s, leave)
    try:
        yield
    finally:
        for s in replaced:
            signal.signal(s, signal.SIG_DFL)


def _rank(lifeline: int, call: int, result: int) -> None:
    def run() -> Any:
        fn, args, kwargs = unpack_call(read_file(call))
        return fn(*args, **kwargs)

    def failed(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        log.error("rank %d: %s: %s", rank, kind.__name__, error)  # the caller of ``launch`` gets the traceback
        if outcome.error is None:  # at the program's end, after the function
            write_file(result, pack_outcome(Outcome(error=error, at=time.time()), rank))

    follow(lifeline)
    keep_freed_memory()
    rank, outcome = settings.RANK.get(), Outcome()
    sys.excepthook = failed  # a backend's own hook, which informs the other ranks, calls this one
    outcome = outcome_of(run)
    error = outcome.error
    if isinstance(error, SystemExit):
        exited = RuntimeError(f"rank {rank} called sys.exit({error.code!r})")
        outcome = Outcome(None, None if error.code in (0, None) else exited, outcome.at)
    write_file(result, pack_outcome(outcome, rank))
    if error is not None:
        raise error


class Processes:
    """Processes started with ``start``. Those still running end at ``close``, or with this process."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        # a child inherits neither, unless pass_fds names it; nobody writes, so a read ends when this process does
        self._lifeline, self._owned = os.pipe()

    def start(
        self,
        module: str,
        arguments: Sequence[object] = (),
        *,
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
        log: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start ``python -m module LIFELINE arguments`` with ``fds`` open, which first calls ``follow(LIFELINE)``.
        ``log``: a file for its output; None for this process's output."""
        path = [p or os.getcwd() for p in sys.path]  # which a file in the working directory cannot shadow
        # not alter_sys: it would end the ``__main__`` of ``ThisProgram`` before threads and exit handlers
        code = f"import runpy, sys; sys.path[:] = {path!r}; runpy.run_module({module!r}, run_name='__main__')"
        with nullcontext() if log is None else log.open("wb") as out:
            process = subprocess.Popen(
                [*interpreter(), "-c", code, str(self._lifeline), *map(str, arguments)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                pass_fds=(self._lifeline, *fds),
                start_new_session=True,  # Ctrl-C in a terminal reaches the owner only
            )
        self.all.append(process)
        return process

    def join(self, grace: float, patience: float) -> list[int | None]:
        """Wait for all processes. After one failed, the others get ``grace`` seconds to fail by themselves
        and are then ended. Returns the exit codes, None for a process that was ended."""
        while all(p.poll() in (None, 0) for p in self.all):
            if all(p.poll() == 0 for p in self.all):
                return [0] * len(self.all)
            time.sleep(_POLL)
        self._wait(grace)
        codes = [p.poll() for p in self.all]
        self.send(signal.SIGTERM)
        self._wait(patience)  # for their SIGTERM handlers; a stopped process runs none
        return codes

    def send(self, number: int) -> None:
        for process in self.all:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def close(self, patience: float = 0.0) -> None:
        """Wait ``patience`` seconds for all to end. Kill the others and wait for their end."""
        self._wait(patience)
        for process in self.all:
            process.kill()
            process.wait()
        os.close(self._owned)
        os.close(self._lifeline)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.all:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def rank_environment(rank: int, size: int, job: Mapping[str, str]) -> dict[str, str]:
    """The environment of rank ``rank`` of ``size`` on this host. ``job``: variables for the rendezvous."""
    return settings.inherited() | settings.of_rank(rank, size) | dict(job)


def serving_environment(rank: int, size: int, job: Mapping[str, str]) -> dict[str, str]:
    """``rank_environment``; by default the host's cores are divided among the ranks, and tensors are in huge pages."""
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    return {settings.THREADS.name: str(threads), settings.HUGE_PAGES.name: "1"} | rank_environment(rank, size, job)


def follow(fd: int) -> None:
    """End this process when the owner of the lifeline ends, for whatever reason."""

    def end() -> None:
        os.read(fd, 1)
        os._exit(1)

    threading.Thread(target=end, name="tpcore lifeline", daemon=True).start()


if __name__ == "__main__":
    _rank(*map(int, sys.argv[1:]))
