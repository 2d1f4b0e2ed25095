"""What a traced program is, to those who ask for one; and what the backends that make one share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..comm import Comm
from ..mesh import Group
from ..transport import Transport

if TYPE_CHECKING:
    from ..context import ParallelContext

Function = Callable[[Mapping[str, Tensor], Sequence[Tensor]], list[Tensor]]
"""What is traced: outputs from weights by name and inputs, and from nothing else."""
LoadedProgram = Callable[[Sequence[Tensor]], list[Tensor]]
"""A traced function, loaded, with its weights in place."""


@dataclass(frozen=True)
class DynamicDim:
    """A dimension of an input whose size may change from call to call, within bounds that are included.

    Dimensions of one name have one size in every call.
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
"""The dynamic dimensions of every input."""


def group_name(group: Group) -> str:
    """How a program names a group: by the axes of the mesh, which are the same in every process."""
    return ".".join(group.axes)


def comm_named(ctx: ParallelContext, name: str) -> Comm:
    """The Comm over the group that ``group_name`` gave this name."""
    return ctx.comm(*name.split("."))


def program_comms(ctx: ParallelContext) -> list[Comm]:
    """Those that a program may use, one for each group. Their positions are inputs of it."""
    return [ctx.comm(axis) for axis in ctx.mesh.axes] + [ctx.world]


@contextmanager
def traced(
    comms: Sequence[Comm],
    positions: Sequence[Tensor],
    transport: Callable[[Comm], Transport] | None = None,
) -> Iterator[None]:
    """Within, the ``comms`` are of the program that is traced: ``positions`` are inputs of it, ``transport``
    gives what puts their collectives into it. None: what they have does that by itself."""
    with ExitStack() as stack:
        for comm, position in zip(comms, positions, strict=True):
            stack.enter_context(comm.traced(position, None if transport is None else transport(comm)))
        yield
