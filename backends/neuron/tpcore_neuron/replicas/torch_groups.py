"""torch.distributed for ranks in one process: each rank has its own groups, all share one store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch_xla.distributed.xla_backend  # noqa: F401  registers "xla"


@dataclass
class _Groups:
    """The fields of torch's ``_World``, of which a process has only one."""

    default_pg: Any = None
    group_count: int = 0
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, str] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)


class Worlds:
    """Replaces torch's single ``_World`` by one for each rank. It looks up the rank and is not thread-local,
    because autograd's threads, one for each device, belong to the same ranks."""

    _own = ("groups", "rank", "store")
    groups: dict[int | None, _Groups]
    rank: Callable[[], int | None]
    store: dist.Store | None

    def __init__(self, rank: Callable[[], int | None]) -> None:
        self.groups, self.rank, self.store = {}, rank, None

    def __getattr__(self, name: str) -> Any:
        if name in self._own:
            raise AttributeError(name)
        return getattr(self.groups.setdefault(self.rank(), _Groups()), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.groups.setdefault(self.rank(), _Groups()), name, value)

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
