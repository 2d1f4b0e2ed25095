"""Unmodified per-rank code on N XLA replicas, with real collectives, on any machine with torch_xla."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from multiprocessing import Pipe
from typing import Any

from torch import Tensor

from tpcore.errors import BackendError, PeerLostError
from tpcore.processes.spawn import Processes
from tpcore.processes.transfer import Outcome, pack_call, root_cause, unpack_outcome
from tpcore.settings import environment
from tpcore.wait_status import described

from .stablehlo import HloProgram

START = 120.0
"""Seconds beyond the timeout that a process of replicas may take to start and to answer."""

END = 60.0
"""Seconds that it may take to end: a save in the background may be under way."""


def run_replicas(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """``fn(*args, **kwargs)`` on ``world`` XLA:CPU replicas, each as if torchrun had started it; the results
    in rank order, their tensors on the CPU.

    ``fn`` is what runs on one NeuronCore: ``tpcore.init(backend="neuron", tp=...)``, a training loop,
    ``torch_xla.sync()``, ``torch.distributed`` over "xla". The replicas are threads of one process, which
    is kept for the next call with the same ``world``; ``fn`` travels there by cloudpickle. One of them runs
    Python at a time; random state, environment and tpcore's context are each rank's own. Other globals of a
    module are shared.

    Wherever a program runs, those of all ranks are compared: if they differ, every rank gets a
    CollectiveMismatchError that names the ranks and shows the lines. The error of one rank is raised here.
    ``timeout``: seconds that may pass without any rank moving on; CollectiveTimeoutError then says what
    each rank is at. ``env``: variables for this run.
    """
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"world must be a whole number of replicas, 1 or more, not {world!r}")
    if find_spec("torch_xla") is None:
        raise BackendError(
            "replicas need torch_xla: pip install 'tpcore[xla]', which brings torch 2.9 with it"
        )
    process = _processes.get(world)
    if process is None or not process.alive:
        process = _processes[world] = _Process(world)
    outcomes = process.run(pack_call(fn, args, kwargs), timeout, dict(env or {}))
    error = root_cause(outcomes)
    if error is not None:
        raise error
    return [o.value for o in outcomes]


class _Process:
    def __init__(self, world: int) -> None:
        self._world = world
        self._conn, theirs = Pipe()
        fd = theirs.fileno()
        self._processes = Processes()
        self._process = self._processes.start(
            "tpcore_neuron.replicas.process", (world, fd), environment=environment(), fds=[fd]
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, call: bytes, timeout: float, env: dict[str, str]) -> list[Outcome]:
        self._conn.send((call, timeout, env))
        try:
            broken, packed = self._conn.recv()
        except (EOFError, ConnectionResetError):
            return [Outcome(error=self._died())]
        if broken:
            self._process.wait()
        return [unpack_outcome(one) for one in packed]

    def _died(self) -> PeerLostError:
        self._conn.close()
        how = described(self._process.wait())
        return PeerLostError(
            f"the process of {self._world} replicas {how}. Its stderr has the reason; if that is a "
            "collective at which not all threads arrived, a rank read a value in C++, where it does not meet "
            "the others: read it with .cpu() or .item(), or run torch_xla.sync() before"
        )

    def close(self) -> None:
        self._conn.close()
        self._processes.close(END)


_processes: dict[int, _Process] = {}


@atexit.register
def close() -> None:
    """End the processes that hold replicas; the next call starts anew."""
    while _processes:
        _processes.popitem()[1].close()


def lower(*tensors: Tensor) -> HloProgram:
    """The program that computes ``tensors``, without compiling or running it; the same on every rank, or
    every rank gets an error that shows the differing lines. To be called inside ``run_replicas``."""
    from . import meeting_points

    return meeting_points.lowered(list(tensors))


def programs() -> list[HloProgram]:
    """The programs that this run has run so far. To be called inside ``run_replicas``."""
    from . import meeting_points

    return meeting_points.recorded()
