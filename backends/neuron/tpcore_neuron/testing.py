"""Runs unmodified per-rank code without the hardware: on N XLA replicas, with real collectives, on any machine with
torch_xla; and what the stand-in for AWS's native PyTorch has counted in this process."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from typing import Any

from torch import Tensor

from tpcore.errors import BackendError, PeerLostError, described
from tpcore.extras import module_spec
from tpcore.processes.launch import Processes
from tpcore.processes.transfer import Outcome, pack_call, root_cause, unpack_outcome
from tpcore.settings import environment

from .replicas.stablehlo import HloCollective as Collective
from .replicas.stablehlo import HloProgram as Program
from .stand_in.limits import TABLE as LIMITS

__all__ = ["LIMITS", "Collective", "Program", "lower", "operators", "programs", "refused", "run_replicas"]

END = 60.0
"""Seconds that the process may take to end: a background save may be under way."""


def run_replicas(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world`` XLA:CPU replicas, each as if torchrun had started it. Return the
    results in rank order, with tensors on the CPU.

    ``fn`` is the code for one NeuronCore: ``tpcore.init(backend="neuron", tp=...)``, a training loop,
    ``torch_xla.sync()``, ``torch.distributed`` over "xla". The replicas are threads of one process, which is kept for
    the next call with the same ``world``; ``fn`` is sent there by cloudpickle. One thread runs Python at a time. Each
    rank has its own random state, environment and tpcore context; other globals of modules are shared.

    Whenever programs run, all ranks' programs are compared. If they differ, every rank gets a CollectiveMismatchError
    that names the ranks and shows the lines. The error of a rank is raised here. ``timeout``: seconds without progress
    of any rank, after which CollectiveTimeoutError reports where each rank is. ``env``: variables for this run.
    """
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"world must be a whole number of replicas, 1 or more, not {world!r}")
    if module_spec("torch_xla") is None:
        raise BackendError("replicas need torch_xla: pip install 'tpcore[xla]', which brings torch 2.9 with it")
    process = _processes.get(world)
    if process is None or not process.alive:
        process = _processes[world] = _Process(world)
    outcomes = process.run(pack_call(fn, args, kwargs), timeout, dict(env or {}))
    if (error := root_cause(outcomes)) is not None:
        raise error
    return [o.value for o in outcomes]


class _Process:
    def __init__(self, world: int) -> None:
        self._world = world
        self._conn, child_end = Pipe()
        fd, module = child_end.fileno(), "tpcore_neuron.replicas.process"
        self._processes = Processes()
        self._process = self._processes.start(module, (world, fd), environment=environment(), fds=[fd])
        child_end.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, call: bytes, timeout: float, env: dict[str, str]) -> list[Outcome]:
        self._conn.send((call, timeout, env))
        try:
            broken, packed = self._conn.recv()
        except (EOFError, ConnectionResetError):
            self._conn.close()
            how = described(self._process.wait())
            text = (
                f"the process of {self._world} replicas {how}. Its stderr has the reason; if that is a "
                "collective at which not all threads arrived, a rank read a value in C++, where it does not meet "
                "the others: read it with .cpu() or .item(), or run torch_xla.sync() before"
            )
            return [Outcome(error=PeerLostError(text))]
        if broken:
            self._process.wait()
        return [unpack_outcome(one) for one in packed]

    def close(self) -> None:
        self._conn.close()
        self._processes.close(END)


_processes: dict[int, _Process] = {}


@atexit.register
def close() -> None:
    """End the processes of replicas; the next ``run_replicas`` starts a new one."""
    while _processes:
        _processes.popitem()[1].close()


def refused() -> dict[str, int]:
    """How many calls each limit of Neuron has refused on the stand-in in this process; under ``int64`` and
    ``whole_sums``, how many whole numbers or tensors of them have lost bits there without a word."""
    from .stand_in.device import install

    return dict(install().limits.refused)


def operators() -> dict[str, int]:
    """How often each operator has been dispatched to the stand-in's device in this process."""
    from .stand_in.device import install

    return dict(install().operators)


def lower(*tensors: Tensor) -> Program:
    """The program of ``tensors``, not compiled; an error on every rank if it differs. Inside ``run_replicas``."""
    from .replicas import meeting_points

    return meeting_points.lowered(list(tensors))


def programs() -> list[Program]:
    """The programs that have run so far in this ``run_replicas``. Call it inside."""
    from .replicas import meeting_points

    return meeting_points.programs_here()
