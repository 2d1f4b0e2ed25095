"""Types of traced programs, and helpers that backends with tracing share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..comm.comm import Comm
from ..comm.transport import Transport
from ..layout.mesh import Group

if TYPE_CHECKING:
    from ..runtime.context import ParallelContext

Function = Callable[[Mapping[str, Tensor], Sequence[Tensor]], list[Tensor]]
"""A function to trace: it computes outputs from weights by name and from inputs, and from nothing else."""
LoadedProgram = Callable[[Sequence[Tensor]], list[Tensor]]
"""A traced function, loaded, with its weights in place. It returns new tensors at each call."""


@dataclass(frozen=True)
class DynamicDim:
    """A dimension of an input whose size may change between calls, from ``min`` to ``max``, both included.

    Dimensions with the same name have the same size in every call.
    """

    name: str
    min: int = 1
    max: int | None = None

    def __str__(self) -> str:
        return f"{self.name} (from {self.min}" + (" on)" if self.max is None else f" to {self.max})")


@dataclass(frozen=True)
class CompilerOptions:
    """What a caller asks of the compiler of a backend that has one for traced programs."""

    args: tuple[str, ...] = ()
    workdir: str | None = None  # where it leaves its files; None: they are removed


Dims = Sequence[Mapping[int, DynamicDim]]
"""The dynamic dimensions of each input, by index."""


def group_name(group: Group) -> str:
    """The name of a group in a program, the same in every process: its mesh axes, and the length of runs
    within them: ``pp.tp``, ``tp/2``."""
    return ".".join(group.axes) + ("" if group.within is None else f"/{group.within}")


def comm_named(ctx: ParallelContext, name: str) -> Comm:
    """The Comm whose ``group_name`` is ``name``."""
    axes, _, within = name.partition("/")
    return ctx.comm(*axes.split("."), within=int(within) if within else None)


def program_comms(ctx: ParallelContext) -> list[Comm]:
    """The Comms that a program may use: of each axis, of the world, and those that the model's layers made,
    over pp x tp or within tp for instance. Their positions are inputs of the program."""
    known = [ctx.comm(axis) for axis in ctx.mesh.axes] + [ctx.world]
    return known + [comm for comm in ctx.comms if comm not in known]


@contextmanager
def traced(
    comms: Sequence[Comm],
    positions: Sequence[Tensor],
    transport: Callable[[Comm], Transport] | None = None,
) -> Iterator[None]:
    """Trace a program inside the block: the Comms take ``positions``, which are inputs of the program, and
    the transports that ``transport`` returns. None: they keep their transports, which can be traced."""
    with ExitStack() as stack:
        for comm, position in zip(comms, positions, strict=True):
            stack.enter_context(comm.traced(position, None if transport is None else transport(comm)))
        yield
