"""The one piece of ambient state. Read by layer constructors, never by forward or backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch

from .backend.interface import Backend
from .comm import Comm
from .errors import BackendError
from .mesh import Mesh

if TYPE_CHECKING:
    from .checks import Checks


@dataclass(frozen=True)
class ParallelContext:
    """A backend, the mesh it runs on, and this process's (or thread's) rank in it."""

    backend: Backend
    mesh: Mesh
    rank: int  # host-side only: file names, logs. Graphs use comm.position
    checks: Checks | None = field(default=None, repr=False, compare=False)
    _comms: dict[tuple[tuple[str, ...], int | None], Comm] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _adopted: list[Comm] = field(default_factory=list, init=False, repr=False, compare=False)

    def __deepcopy__(self, memo: object) -> ParallelContext:
        return self  # a copied model lies on the same mesh

    def __repr__(self) -> str:
        """With the groups that exist already, and how each exchanges tensors."""
        what = [f"{type(self.backend).__name__}, {self.mesh}, rank {self.rank}"]
        what += [f"{' x '.join(c.group.axes)}: {c.transport!r}" for c in self._comms.values() if c.size > 1]
        return f"ParallelContext({'; '.join(what)})"

    def comm(self, *axes: str, within: int | None = None) -> Comm:
        """Collectives over ``axes``, or over runs of ``within`` consecutive ranks of such a group.

        The first call for a group is itself collective over the world: all ranks make their groups in one
        order. ``init`` makes those of single axes, layers make theirs in their constructors; later calls
        return what was made.
        """
        if within is not None and within == math.prod(self.mesh.axes.get(axis, 1) for axis in axes):
            within = None
        if (axes, within) not in self._comms:
            group = self.mesh.group(*axes, within=within)
            name = " x ".join(axes) + ("" if within is None else f" within {within}")
            self._comms[axes, within] = self.backend.comm(group, self.rank).called(name)
        return self._comms[axes, within]

    def named(self, name: str) -> Comm:
        """The Comm of this context, or that it adopted, whose ``name`` this is. BackendError for another."""
        for comm in (*self._comms.values(), *self._adopted):
            if comm.name == name:
                return comm
        raise BackendError(f"a compiled graph wants the group {name!r}, and {self} has none of that name")

    @cached_property
    def world(self) -> Comm:
        return self.comm(*self.mesh.axes)

    def coord(self, axis: str) -> int:
        """Position on ``axis``; host-side only, as ``rank``."""
        return self.mesh.coords(self.rank)[axis]

    def over(self, comm: Comm) -> tuple[ParallelContext, tuple[str, ...]]:
        """What a tensor that is cut over ``comm`` lies on: a context, and the axes of its mesh.

        This context where its axes make that group, also where the group is the program's own and of the
        same ranks. A group that no axes make is a mesh of one axis, ``group``: gradients are summed over
        it, and a checkpoint, which holds what is cut over mesh axes, refuses the tensor.
        """
        mine, axes = comm.group.members(self.rank), comm.group.axes
        if axes and set(axes) <= set(self.mesh.axes) and self.mesh.group(*axes).members(self.rank) == mine:
            return self, axes
        for count in range(1, len(self.mesh.axes) + 1):
            for names in permutations(self.mesh.axes, count):
                if self.mesh.group(*names).members(self.rank) == mine:
                    return self, names
        alone = ParallelContext(self.backend, Mesh({"group": comm.size}), mine.index(self.rank))
        alone._comms[("group",), None] = comm
        return alone, ("group",)

    def comm_for(self, group: Any) -> Comm:
        """The Comm behind ``group``: None (the tp group), a Comm, or the backend's own group object."""
        if group is None:
            return self.comm("tp")
        if isinstance(group, Comm):
            return group
        for comm in (*self._comms.values(), *self._adopted):
            if comm.process_group is group:
                return comm
        name = f"group {len(self._adopted)} of the program"
        self._adopted.append(self.backend.comm_of(group).called(name))
        return self._adopted[-1]

    @property
    def device(self) -> torch.device:
        return self.backend.device()


_current: ContextVar[ParallelContext | None] = ContextVar("tpcore", default=None)
# What init() set. Apart from the ContextVar because a user's own threads do not inherit that one.
_process: list[ParallelContext] = []


def is_initialized() -> bool:
    return _current.get() is not None or bool(_process)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _entered() -> bool:
    return _current.get() is not None


def current() -> ParallelContext:
    """The context in force: the innermost ``use``, else what ``init`` started."""
    if torch.compiler.is_dynamo_compiling():  # which cannot read a ContextVar
        if _entered():
            raise RuntimeError(
                "torch.compile does not see the context of tpcore.use: pass "
                "tensor_model_parallel_group=ctx.comm('tp'), or let tpcore.init make the context"
            )
    elif (ctx := _current.get()) is not None:
        return ctx
    if _process:
        return _process[-1]
    raise RuntimeError(
        "no parallel context: call tpcore.init(backend=..., tp=...) first, or enter tpcore.use(ctx)"
    )


def enter_process(ctx: ParallelContext) -> None:
    """``ctx`` is what ``current`` gives from now on in this process, in threads that enter none."""
    _process.append(ctx)


def leave_process() -> ParallelContext | None:
    """Undo the last ``enter_process`` and give what it set; None where there is none."""
    return _process.pop() if _process else None


def swap_process(contexts: list[ParallelContext]) -> list[ParallelContext]:
    """Put ``contexts`` in the place of what ``enter_process`` set, and give that: for several ranks that take
    turns in one process."""
    before = list(_process)
    _process[:] = contexts
    return before


@contextmanager
def use(ctx: ParallelContext) -> Iterator[ParallelContext]:
    """Make ``ctx`` the current context of this thread for the length of a with block."""
    token = _current.set(ctx)
    try:
        yield ctx
    finally:
        _current.reset(token)
