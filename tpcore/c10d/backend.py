"""The base class of backends over torch.distributed: a subclass sets ``transport`` and ``device()``. It is here and
not in ``backends/`` because third parties derive from it; the core never imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import settings
from ..backend.interface import Backend, Capabilities
from ..comm.transport import Transport
from ..errors import BackendError
from ..layout.mesh import Group
from ..runtime.guards import Guard, installed, refusing
from .supervision.rendezvous import store_of_environment
from .supervision.supervisor import Members, Supervisor
from .supervision.waiting import Waiting
from .transport import C10dTransport, FunctionalTransport

_REPLICAS = signature(DistributedDataParallel.__init__)


class C10dBackend(Backend):
    """One rank of a job. Errors name lost ranks and mismatched calls, whatever the transport. The job is, in this
    order: torch.distributed's default group if the program has made one; the job of torchrun's environment variables;
    a world of one."""

    interface = 2
    capabilities = Capabilities(
        dtypes=(*Capabilities.dtypes, torch.int16, torch.int8), moved=(torch.complex64, torch.complex128)
    )
    transport_class: ClassVar[type[C10dTransport]] = C10dTransport
    transport: ClassVar[str]
    """The transport's name for ``torch.distributed.init_process_group``."""
    library: ClassVar[tuple[str, ...]] = ()
    """Path prefixes of the backend's own files, which call sites in messages skip."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Members, ...], Any] = {}
        self._alone_pg: Any = None
        self._process_groups, self._connected = list[Any](), list[C10dTransport]()
        self._owns = False
        self._supervisor: Supervisor | None = None
        self._guards = ExitStack()
        self.device_meshes: dict[tuple[tuple[str, int], ...], Any] = {}
        """The DeviceMeshes of ``tpcore.checkpoint.dtensor_state_dict``, by axes and sizes: making one is collective."""

    @classmethod
    def unavailable(cls) -> str | None:
        if not dist.is_backend_available(cls.transport):
            return f"torch {torch.__version__} was built without {cls.transport}"
        return None

    @classmethod
    def job(cls, folder: Path) -> dict[str, str]:
        return {settings.STORE.name: str(folder / "store")}

    def start(self, timeout: float) -> tuple[int, int]:
        self._timeout = timeout
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> tuple[int, int]:
        adopted = dist.is_initialized()
        if adopted:
            store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        else:
            store, rank, world = store_of_environment(self._timeout) or (dist.HashStore(), 0, 1)
        self._rank, self._world = rank, world
        if world > 1:
            self._supervisor = Supervisor(store, rank, world, self._timeout, self.library, self.lazy)
            self._supervised(self._supervisor)
            store = self._supervisor.store
        if not adopted:
            supervisor = self._supervisor
            with self._alone() if supervisor is None else supervisor.connecting(range(world), self._sockets):
                self._owns = True  # set before the call: an error inside may leave the group half made
                dist.init_process_group(self.transport, timeout=self._seconds, store=store, rank=rank, world_size=world)
                if world > 1:
                    self._settle(dist.group.WORLD)
        if self._supervisor is not None:
            self._supervisor.peers.hook()
            # wait for all: an error that all ranks raise next must not cut off a rank that still connects
            self._supervisor.meet("have joined")
            why = "DistributedDataParallel would overwrite parts of parameters by the first rank's"
            guard = Guard(DistributedDataParallel, "__init__", refusing(refuse_shards_as_replicas), why)
            self._guards.enter_context(installed([guard]))
        return rank, world

    def stop(self) -> None:
        error = sys.exc_info()[1]  # the error that stops this rank, in a with or finally block
        try:
            if self._supervisor is not None and error is None:
                self._supervisor.settle()
        finally:
            self._close(error or sys.exc_info()[1])

    def _close(self, error: BaseException | None) -> None:
        self.device_meshes.clear()
        self._guards.close()
        if self._supervisor is not None:
            self._supervisor.close(error)
        for transport in self._connected:
            transport.close()
        self._connected.clear()
        self._groups.clear()
        self._alone_pg = None
        for pg in self._process_groups:
            with suppress(ValueError):  # the program has destroyed it, or all groups
                dist.destroy_process_group(pg)
        self._process_groups.clear()
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
        self._owns = False

    def gone(self, rank: int) -> str | None:
        return None if self._supervisor is None else self._supervisor.peers.gone(rank)

    # -- hooks for subclasses
    @property
    def lazy(self) -> bool:
        """Whether the transport's wait returns at once and makes a device's stream wait."""
        return self.device().type != "cpu"

    def _supervised(self, supervisor: Supervisor) -> None:
        """Called on all ranks before the first group is made: what they compare here, they refuse together."""

    def _sockets(self) -> frozenset[int]:
        """Inodes of sockets to shut down when the job is lost, for a transport that cannot be aborted."""
        return frozenset()

    def _alone(self) -> AbstractContextManager[None]:
        """The context in which a group of this rank alone is made."""
        return nullcontext()

    def _compares(self, pg: Any, waiting: Waiting) -> bool:
        """Whether the transport over ``pg`` compares calls itself. All members call it, once for a group."""
        return False

    def connect(self, group: Group, rank: int) -> Transport:
        if group.size == 1:
            return self._over(group, self._single)
        if group.partition not in self._groups:
            self._groups[group.partition] = self._group(group)
        pg = self._groups[group.partition]
        return self._over(group, lambda: pg)

    def adopt(self, process_group: Any) -> Transport:
        """Collectives over a torch.distributed group; itself collective."""
        members = tuple(dist.get_process_group_ranks(process_group))
        return self._over(Group(("user",), (members,)), lambda: process_group)

    def _over(self, group: Group, pg: Callable[[], Any]) -> Transport:
        transport = self._made_over(group, pg, self._watch(group, pg()) if group.size > 1 else None)
        if self.capabilities.functional and group.size > 1:
            transport.in_graphs = FunctionalTransport(transport, self.capabilities)
        return transport

    def _watch(self, group: Group, pg: Any) -> Waiting:
        members = group.members(self._rank)
        return self._supervising(members).waiting(pg, group.axes, members, partial(self._compares, pg))

    def _supervising(self, members: Members) -> Supervisor:
        if self._supervisor is None:
            raise BackendError(f"group {members} was made after tpcore.shutdown()")
        return self._supervisor

    def _made_over(self, group: Group, pg: Callable[[], Any], watch: Waiting | None) -> Transport:
        transport = self.transport_class(group, self._rank, pg, self.device(), watch)
        transport.can = self.capabilities
        self._connected.append(transport)
        return transport

    def _group(self, group: Group) -> Any:
        """The process group for this rank's part of ``group``. All ranks make all parts in the same order."""
        members, number = group.members(self._rank), len(self._groups)
        supervisor = self._supervising(members)
        supervisor.agree_on_group(number, group.partition)
        with supervisor.connecting(members, self._sockets):
            pg = self._joined(group)
        self._watch(group, pg)
        supervisor.meet(f"have made group {number}")
        return pg

    def _joined(self, group: Group) -> Any:
        members = group.members(self._rank)
        if self._owns and members == tuple(range(self._world)):
            return dist.group.WORLD
        process_groups = {ranks: self._made_of(ranks, group) for ranks in group.partition}
        self._process_groups.append(process_groups[members])
        self._settle(process_groups[members])
        return process_groups[members]

    def _made_of(self, ranks: Members, group: Group) -> Any:
        """A process group with the ranks in this order: torch sorts them if it is not told otherwise."""
        options: dict[str, Any] = {}
        if list(ranks) != sorted(ranks):
            if "sort_ranks" not in signature(dist.new_group).parameters:
                text = f"the groups over {group.axes} have ranks in the order {ranks}, and torch {torch.__version__}"
                raise BackendError(f"{text} sorts them: name the axes in the mesh's order, or use a later torch")
            options = {"sort_ranks": False}
        return dist.new_group(list(ranks), self._seconds, self.transport, **options)

    def _settle(self, pg: Any) -> None:
        """Wait until all members are connected: a member that leaves early would cut off one that still connects."""
        dist.all_reduce(torch.zeros(1, device=self.device()), group=pg)

    def _single(self) -> Any:
        """The process group of this rank alone, made at the first use (DDP over a dp of one)."""
        if not dist.is_initialized():
            raise BackendError("a process group was asked for before tpcore.init or after tpcore.shutdown")
        if self._alone_pg is None:
            with self._alone():
                self._alone_pg = dist.new_group([self._rank], backend=self.transport, use_local_synchronization=True)
            self._process_groups.append(self._alone_pg)
        return self._alone_pg

    @property
    def _seconds(self) -> timedelta:
        return timedelta(seconds=self._timeout)


def refuse_shards_as_replicas(*args: Any, **kwargs: Any) -> None:
    """``DistributedDataParallel(...)``, also of accelerate and Fabric, is a ValueError on its ranks if their parts of a
    parameter differ: it would overwrite all by its first rank's."""
    given = _REPLICAS.bind(*args, **kwargs).arguments
    module, mesh = given["module"], given.get("device_mesh")
    group = given.get("process_group") if mesh is None else mesh.get_group(0)
    ranks, me = dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank()
    for parameter_name, parameter in module.named_parameters():
        mark = getattr(parameter, "tpcore_sharding", None)  # of layers, which are above this room
        unlike = [r for r in ranks if not _same_part(mark, me, r)] if hasattr(mark, "layout") else []
        if unlike:
            raise ValueError(
                f"DistributedDataParallel over ranks {ranks}, which hold different parts of "
                f"{parameter_name!r}: rank {unlike[0]} has another part than rank {me}, and would lose it. "
                "Pass process_group=ctx.comm('dp').process_group, or leave DistributedDataParallel out and "
                "call tpcore.optimizer_step"
            )


def _same_part(mark: Any, me: int, other: int) -> bool:
    """Whether ranks ``me`` and ``other`` of the job have the same entries."""
    ctx = mark.ctx
    if ctx.mesh.size != dist.get_world_size():  # cut over a group of no mesh axes: ParallelContext.over
        members = ctx.world.group.members(me)
        return other == me or other not in members
    return bool(mark.layout.boxes(me, ctx.mesh) == mark.layout.boxes(other, ctx.mesh))
