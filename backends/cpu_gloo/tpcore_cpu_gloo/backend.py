"""Joining a job over torch.distributed, with gloo for transport."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpcore.backend import Backend
from tpcore.comm import Comm
from tpcore.mesh import Group

from .comm import GlooComm


class GlooBackend(Backend):
    """Runs where ``torchrun`` started the processes, or over ``store`` with an explicit rank and world."""

    def __init__(self, store: dist.Store | None = None, rank: int = 0, world: int = 1) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._owns = False
        self._groups: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._timeout = timedelta(seconds=120)

    @classmethod
    def unavailable(cls) -> str | None:
        if not dist.is_available():
            return f"torch {torch.__version__} was built without torch.distributed"
        if not dist.is_gloo_available():
            return f"torch {torch.__version__} was built without gloo"
        return None

    def start(self, timeout: float) -> tuple[int, int]:
        self._timeout = timedelta(seconds=timeout)
        if dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        if self._store is None and "RANK" in os.environ:
            dist.init_process_group("gloo", timeout=self._timeout)
        else:
            store = self._store or dist.HashStore()
            dist.init_process_group(
                "gloo", store=store, rank=self._rank, world_size=self._world, timeout=self._timeout
            )
        self._owns = True
        return dist.get_rank(), dist.get_world_size()

    def stop(self) -> None:
        self._groups.clear()
        if self._owns:
            dist.destroy_process_group()
            self._owns = False

    def comm(self, group: Group, rank: int) -> Comm:
        members = group.members(rank)
        if group.partition not in self._groups:
            # every rank creates every subgroup, in the same order, as new_group demands
            pgs = {ranks: dist.new_group(list(ranks), self._timeout, "gloo") for ranks in group.partition}
            self._groups[group.partition] = pgs[members]
        return GlooComm(group, members.index(rank), self._groups[group.partition])

    def comm_of(self, process_group: Any) -> Comm:
        ranks = tuple(dist.get_process_group_ranks(process_group))
        return GlooComm(Group(("user",), (ranks,)), dist.get_group_rank(process_group, dist.get_rank()), process_group)

    def device(self) -> torch.device:
        return torch.device("cpu")
