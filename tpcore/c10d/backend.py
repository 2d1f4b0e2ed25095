"""Backends that torch.distributed drives: everything but the transport's name and the device.

A backend is a subclass of ``C10dBackend`` that names its ``transport`` and its ``device()``. The module is
here, and not in ``backends/``, because third parties derive from it; core never imports it, so a job on
another backend does not load it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from .. import settings
from ..backend.capabilities import Capabilities
from ..backend.interface import Backend
from ..comm import Comm
from ..errors import BackendError
from ..mesh import Group
from .comm import C10dComm

Members = tuple[int, ...]


def job_of_environment() -> tuple[dist.Store, int, int] | None:
    """(store, rank, world size) of a process that was started with the variables of ``C10dBackend.job``.

    A file and not a port: there is none to choose, and torch looks up the name of every address that it
    connects to, and may wait for it.
    """
    if not settings.STORE.is_set:
        return None
    return dist.FileStore(settings.STORE.get(), -1), settings.RANK.get(), settings.WORLD_SIZE.get()


class C10dBackend(Backend):
    """One rank of a job. Which job: torch.distributed's default group if the program has made one, else
    ``store`` with an explicit rank and world, else what torchrun's environment says, else a world of one.
    """

    interface = 1
    capabilities = Capabilities(dtypes=(*Capabilities.dtypes, torch.int16, torch.int8))
    comm_class: ClassVar[type[Comm] | None] = C10dComm
    transport: ClassVar[str]
    """Its name for ``torch.distributed.init_process_group``."""

    def __init__(self, store: dist.Store | None = None, rank: int = 0, world: int = 1) -> None:
        self._given = None if store is None else (store, rank, world)
        self._groups: dict[tuple[Members, ...], Any] = {}
        self._user_groups: dict[Any, Comm] = {}
        self._singles: list[Any] = []
        self._made: list[Any] = []
        self._timeout = 0.0
        self._rank, self._world = rank, world
        self._owns = False

    @classmethod
    def unavailable(cls) -> str | None:
        if not dist.is_available():
            return f"torch {torch.__version__} was built without torch.distributed"
        if not dist.is_backend_available(cls.transport):
            return f"torch {torch.__version__} was built without {cls.transport}"
        return None

    @classmethod
    def job(cls, folder: Path) -> dict[str, str]:
        return {settings.STORE.name: str(folder / "store")}

    def start(self, timeout: float) -> tuple[int, int]:
        self._timeout = timeout
        if not dist.is_initialized():
            job: dict[str, Any] = {}  # what torchrun's environment says
            given = self._given or job_of_environment()
            if given is not None:
                job = dict(zip(("store", "rank", "world_size"), given, strict=True))
            elif not settings.WORLD_SIZE.is_set:
                job = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            self._owns = True  # from here on, for an error inside may leave it half made
            try:
                dist.init_process_group(self.transport, timeout=self._seconds, **job)
                self._settle(dist.group.WORLD)
            except BaseException:
                self.stop()
                raise
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        return self._rank, self._world

    def stop(self) -> None:
        self._groups.clear()
        self._user_groups.clear()
        self._singles.clear()
        for pg in self._made:
            dist.destroy_process_group(pg)
        self._made.clear()
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
        self._owns = False

    def comm(self, group: Group, rank: int) -> Comm:
        if group.size == 1:
            return self._comm(group, self._single)
        if group.partition not in self._groups:
            self._groups[group.partition] = self._group(group)
        pg = self._groups[group.partition]
        return self._comm(group, lambda: pg)

    def comm_of(self, process_group: Any) -> Comm:
        """Collectives over a torch.distributed group. The first call for a group is itself collective."""
        if process_group not in self._user_groups:
            members = tuple(dist.get_process_group_ranks(process_group))
            group = Group(("user",), (members,))
            self._user_groups[process_group] = self._comm(group, lambda: process_group)
        return self._user_groups[process_group]

    def _comm(self, group: Group, pg: Callable[[], Any]) -> Comm:
        return C10dComm(group, group.members(self._rank).index(self._rank), pg, self.device())

    def _group(self, group: Group) -> Any:
        """A process group for this rank's part of ``group``: all ranks make all parts, in one order."""
        members = group.members(self._rank)
        if self._owns and members == tuple(range(self._world)):
            return dist.group.WORLD
        made = {
            ranks: dist.new_group(list(ranks), self._seconds, self.transport) for ranks in group.partition
        }
        self._made.append(made[members])
        self._settle(made[members])
        return made[members]

    def _settle(self, pg: Any) -> None:
        """Until all members are connected: one that is done early would cut off one that still connects."""
        dist.all_reduce(torch.zeros(1, device=self.device()), group=pg)

    def _single(self) -> Any:
        """The process group of this rank alone, made when somebody asks (DDP over a dp of one)."""
        if not dist.is_initialized():
            raise BackendError("a process group was asked for before tpcore.init or after tpcore.shutdown")
        if not self._singles:
            alone = dist.new_group([self._rank], backend=self.transport, use_local_synchronization=True)
            self._singles.append(alone)
            self._made.append(alone)
        return self._singles[0]

    @property
    def _seconds(self) -> timedelta:
        return timedelta(seconds=self._timeout)
