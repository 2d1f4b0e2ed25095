"""Starting the ranks of a job from Python, on this host."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from .. import settings
from .shared_memory import nameless_file, read_file, write_file
from .spawn import Processes, rank_environment
from .transfer import Outcome, death, pack_call, root_cause, unpack_outcome

T = TypeVar("T")

_GRACE = 2.0  # seconds for the other ranks to fail and report their errors, after the first failure
_PATIENCE = 5.0  # seconds for the ranks' SIGTERM handlers
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

    ``fn`` calls ``tpcore.init(tp=...)`` itself. The processes are fresh interpreters. They inherit only the
    environment, the import path and the objects that ``fn`` refers to. With cloudpickle, ``fn`` may be
    defined in a notebook, or in a script without ``if __name__ == "__main__"``.

    ``timeout``: seconds that a collective may wait, as in ``init``. ``env``: variables for the processes.

    If a rank fails, all ranks are ended. The first error that is not the consequence of another rank's is
    raised here, with its traceback as the cause. A rank that died without an error raises PeerLostError.
    """
    if not callable(fn):
        raise TypeError(f"launch needs a function, not {fn!r}")
    if not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs must be a whole number of processes, 1 or more, not {nprocs!r}")
    variables = {settings.THREADS.name: settings.THREADS.text() or str(settings.THREADS.default)}
    if timeout is not None:
        variables[settings.TIMEOUT.name] = str(float(timeout))
    call = pack_call(fn, tuple(args), dict(kwargs or {}))
    outcomes = _run(call, nprocs, variables | dict(env or {}))
    error = root_cause(outcomes)
    if error is not None:
        raise error
    return [outcome.value for outcome in outcomes]


def _run(call: bytes, nprocs: int, variables: Mapping[str, str]) -> list[Outcome]:
    """Run the ranks to their end. Call and results travel in memory, so a full disk does not matter."""
    from ..c10d.supervision.rendezvous import host_store

    files = [nameless_file() for _ in range(1 + nprocs)]
    processes = Processes()
    try:
        write_file(files[0], call)
        store, job = host_store()
        with _signals_raise():
            for rank, result in enumerate(files[1:]):
                environment = rank_environment(rank, nprocs, job) | dict(variables)
                fds = files[0], result
                processes.start("tpcore.processes.child", fds, environment=environment, fds=fds)
            codes = processes.join(_GRACE, _PATIENCE)
        del store  # the ranks use it until they end
        return [_outcome(rank, read_file(files[1 + rank]), code) for rank, code in enumerate(codes)]
    except BaseException:
        processes.send(signal.SIGTERM)
        raise
    finally:
        processes.close(_PATIENCE)
        for fd in files:
            os.close(fd)


def _outcome(rank: int, packed: bytes, code: int | None) -> Outcome:
    if packed:
        return unpack_outcome(packed)
    # None: this process ended it because another rank failed
    return Outcome() if code is None else Outcome(error=death(rank, code))


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
