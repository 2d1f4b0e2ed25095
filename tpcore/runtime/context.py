"""The parallel context: the only ambient state. Layer constructors read it; forward and backward do not."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any, cast
from weakref import WeakSet, ref

import torch

from ..backend.interface import Backend
from ..comm.comm import Comm
from ..comm.observer import Observer
from ..comm.wrapper import define
from ..errors import BackendError, refuse_forked
from ..layout.mesh import BATCH, DATA, Group, Mesh


@dataclass(frozen=True)
class ParallelContext:
    """A backend, the mesh it runs on, and this process's (or thread's) rank in it."""

    backend: Backend
    mesh: Mesh
    rank: int  # host-side only: file names, logs. Graphs use comm.position
    observer: Observer | None = field(default=None, compare=False)
    """In a checked run."""
    part_of: ParallelContext | None = field(default=None, compare=False)
    """The context of the whole job, if this one's mesh is a group of its ranks."""
    reproducible: int | None = field(default=None, compare=False)
    """The largest degree of tp up to which a job has the same bits (``tpcore.init``)."""
    ended: ExitStack = field(default_factory=ExitStack, init=False, compare=False)
    """Closed by ``shutdown``."""
    _comms: dict[tuple[tuple[str, ...], int | None], Comm] = field(default_factory=dict, init=False, compare=False)
    steppers: list[ref[Any]] = field(default_factory=list, init=False, compare=False)
    """The ``Zero1``s made here: their parameters' gradients are averaged by their step alone."""
    before_steps: list[Callable[[Any], None]] = field(default_factory=list, init=False, compare=False)
    """What each optimizer is shown before it steps."""
    layers: WeakSet[Any] = field(default_factory=WeakSet, init=False, compare=False)
    """The modules made here of which other ranks have other parameters."""
    marked: dict[int, ref[Any]] = field(default_factory=dict, init=False, compare=False)
    """By id, the parameters that a script has sharded and marked itself, whose entries in a state_dict have no mark."""
    averaged: dict[int, ref[Any]] = field(default_factory=dict, init=False, compare=False)
    """Those of ``marked`` whose backward takes the mean over the axes that they are sharded over."""
    _pid: int = field(default_factory=os.getpid, init=False, compare=False)
    _adopted: list[Comm] = field(default_factory=list, init=False, compare=False)

    def __deepcopy__(self, memo: object) -> ParallelContext:
        return self  # a copied model is on the same mesh

    def __repr__(self) -> str:
        """Includes the groups made so far, and the transport of each."""
        parts = [f"{type(self.backend).__name__}, {self.mesh}, rank {self.rank}"]
        parts += [f"{' x '.join(c.group.axes)}: {c.transport!r}" for c in self._comms.values() if c.size > 1]
        return f"ParallelContext({'; '.join(parts)})"

    def comm(self, *axes: str, within: int | None = None) -> Comm:
        """Collectives over ``axes``, or over runs of ``within`` consecutive ranks of such a group.

        The first call for a group is itself collective over the world: all ranks must make their groups in
        the same order. ``init`` makes the groups of single axes, layer constructors make their own; later
        calls return the same Comm.
        """
        if within is not None and within == math.prod(self.mesh.axes.get(axis, 1) for axis in axes):
            within = None
        if (axes, within) not in self._comms:
            self.refuse_forked()
            group = self.mesh.group(*axes, within=within)
            comm = self.backend.comm(group, self.rank).in_order(self.reproducible)
            self._comms[axes, within] = comm.called(group.name)
        return self._comms[axes, within]

    def refuse_forked(self) -> None:
        """Raise BackendError in a process that was forked from this rank."""
        refuse_forked(self._pid, self.rank)

    @property
    def comms(self) -> list[Comm]:
        """The Comms that a program may use: of each axis, of the world, and those that layers made so far,
        over pp x tp or runs within tp for instance. In one order on all ranks."""
        comms = [self.comm(axis) for axis in self.mesh.axes] + [self.world]
        return comms + [comm for comm in self._comms.values() if comm not in comms]

    def named(self, name: str) -> Comm:
        """The Comm called ``name``, by its group, or adopted here. BackendError if there is none."""
        for comm in (*self._comms.values(), *self._adopted):
            if comm.name == name:
                return comm
        axes, _, within = name.partition("/")
        names = axes.split(".") if axes else []  # none: a group of this rank alone
        if set(names) <= set(self.mesh.axes):
            return self.comm(*names, within=int(within) if within else None)
        raise BackendError(f"a compiled graph needs the group {name!r}, and {self} has none of that name")

    @cached_property
    def world(self) -> Comm:
        return self.comm(*self.mesh.axes)

    @property
    def batch(self) -> Comm:
        """Over the ranks that have other examples."""
        return self.comm(*self.mesh.present(BATCH))

    @property
    def data(self) -> Comm:
        """Over the ranks that have other examples or other tokens: gradients are a mean over these."""
        return self.comm(*self.mesh.present(DATA))

    def over_axis(self, axis: str) -> Comm | None:
        """The Comm over ``axis``; None where the mesh has no such ranks."""
        return self.comm(axis) if self.mesh.axes.get(axis, 1) > 1 else None

    def index(self, comm: Comm) -> int:
        """This rank's position in the group of ``comm``; host-side only, like ``rank``."""
        return comm.group.members(self.rank).index(self.rank)

    def coord(self, axis: str) -> int:
        """This rank's position on ``axis``; host-side only, like ``rank``."""
        return self.mesh.coords(self.rank)[axis]

    @cached_property
    def place(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """This rank, and the job's mesh without axes of one rank: equal where a sharded tensor has the same entries."""
        job = self.part_of or self
        return job.rank, tuple((axis, size) for axis, size in job.mesh.axes.items() if size > 1)

    def over(self, comm: Comm) -> tuple[ParallelContext, tuple[str, ...]]:
        """The context and the mesh axes of a tensor that is cut over ``comm``.

        This context, if some of its axes form a group of the same ranks, whoever made ``comm``. Otherwise a
        context whose mesh has the one axis ``group``: gradients are summed over it, but a checkpoint refuses
        the tensor, because checkpoints know cuts over mesh axes only.
        """
        members, axes = comm.group.members(self.rank), comm.group.axes
        if axes and set(axes) <= set(self.mesh.axes) and self.mesh.group(*axes).members(self.rank) == members:
            return self, axes
        for count in range(1, len(self.mesh.axes) + 1):
            for names in permutations(self.mesh.axes, count):
                if self.mesh.group(*names).members(self.rank) == members:
                    return self, names
        group_ctx = ParallelContext(
            self.backend,
            Mesh({"group": comm.size}),
            members.index(self.rank),
            part_of=self.part_of or self,
            reproducible=self.reproducible,
        )
        group_ctx._comms[("group",), None] = comm
        return group_ctx, ("group",)

    def comm_for(self, group: Any) -> Comm:
        """The Comm for ``group``: None (the tp group), a Comm, or the backend's own group object."""
        if group is None:
            return self.comm("tp")
        if isinstance(group, Comm):
            return group
        for comm in (*self._comms.values(), *self._adopted):
            if comm.process_group is group:
                return comm
        name = f"group {len(self._adopted)} of the program"
        self._adopted.append(self.backend.comm_of(group).in_order(self.reproducible).called(name))
        return self._adopted[-1]

    def grouped(self, name: str, partition: tuple[tuple[int, ...], ...]) -> Comm:
        """The Comm ``name`` over groups that no axes make. The first call of a name is collective over the world."""
        group_comm = next((comm for comm in self._adopted if comm.name == name), None)
        if group_comm is None:
            group_comm = self.backend.comm(Group((), partition), self.rank).in_order(self.reproducible).called(name)
            self._adopted.append(group_comm)
        return group_comm

    @property
    def device(self) -> torch.device:
        return self.backend.device()


_current: ContextVar[ParallelContext | None] = ContextVar("tpcore", default=None)
# The context of init(). Not in the ContextVar, because a user's own threads do not inherit its value.
_process: list[ParallelContext] = []


def is_initialized() -> bool:
    return _current.get() is not None or bool(_process)


def _entered() -> bool:
    return _current.get() is not None


# All that torch.compiler.assume_constant_result does, but for importing torch._dynamo, which costs every rank
# and every command as much again as torch
_entered._dynamo_marked_constant = True  # type: ignore[attr-defined]


def current() -> ParallelContext:
    """The current context: that of the innermost ``use``, else that of ``init``."""
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot read a ContextVar
        if _entered():
            raise RuntimeError(
                "torch.compile does not see the context of tpcore.use: pass group=ctx.comm('tp'), or let "
                "tpcore.init make the context"
            )
    elif (ctx := _current.get()) is not None:
        return ctx
    if _process:
        return _process[-1]
    raise RuntimeError("no parallel context: call tpcore.init(backend=..., tp=...) first, or enter tpcore.use(ctx)")


def enter_process(ctx: ParallelContext) -> None:
    """Make ``ctx`` the context of this process: of all threads that are not inside ``use``."""
    _process.append(ctx)


def leave_process() -> ParallelContext | None:
    """Undo the last ``enter_process`` and return its context; None if there was none."""
    return _process.pop() if _process else None


def swap_process(contexts: list[ParallelContext]) -> list[ParallelContext]:
    """Replace the contexts of ``enter_process``, and return the old ones: for ranks that take turns in one process."""
    before = list(_process)
    _process[:] = contexts
    return before


_LIBRARY = define(lambda name: current().named(name))
"""The operators of graphs, which look their Comm up in the current context."""


@contextmanager
def use(ctx: ParallelContext) -> Iterator[ParallelContext]:
    """Make ``ctx`` the current context of this thread inside a with block."""
    token = _current.set(ctx)
    try:
        yield ctx
    finally:
        _current.reset(token)


def in_eager_mode() -> AbstractContextManager[Any]:
    """torch.compile runs functions as they are: compiled code has no operations that an observer could see."""
    return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))
