"""torch.distributed for ranks in one process: each rank has its own groups, all share one store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch_xla.distributed.xla_backend  # noqa: F401  registers "xla"

_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")


def _groups() -> SimpleNamespace:
    """The fields of torch's ``_World``, of which a process has only one."""
    return SimpleNamespace(default_pg=None, group_count=0, **{name: {} for name in _MAPS})


class Worlds:
    """Replaces torch's single ``_World`` by one for each rank. It looks up the rank and is not thread-local,
    because autograd's threads, one for each device, belong to the same ranks."""

    _own = ("groups", "rank", "store")
    groups: dict[int | None, SimpleNamespace]
    rank: Callable[[], int | None]
    store: dist.Store | None

    def __init__(self, rank: Callable[[], int | None]) -> None:
        self.groups, self.rank, self.store = {}, rank, None

    def __getattr__(self, name: str) -> Any:
        if name in self._own:
            raise AttributeError(name)
        return getattr(self.groups.setdefault(self.rank(), _groups()), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.groups.setdefault(self.rank(), _groups()), name, value)

    def forget(self) -> None:
        self.groups.clear()
        self.store = None


def install(rank: Callable[[], int | None], size: int) -> Worlds:
    worlds = Worlds(rank)
    c10d._world = worlds  # type: ignore[assignment]
    native: Any = torch._C._distributed_c10d
    native._set_thread_isolation_mode(True)  # one table of groups by name for each thread

    def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[dist.Store, int | None, int]]:
        if worlds.store is None:
            worlds.store = dist.HashStore()
        yield worlds.store, worlds.rank(), size

    handlers = c10d.rendezvous.__globals__["_rendezvous_handlers"]
    for scheme in ("env", "xla"):
        handlers[scheme] = meet
    return worlds
