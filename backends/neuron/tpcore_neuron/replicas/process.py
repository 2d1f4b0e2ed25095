"""The process of the replicas: ``python -m tpcore_neuron.replicas.process LIFELINE WORLD FD``."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tpcore import nested, settings
from tpcore.private import native_groups
from tpcore.processes.launch import follow
from tpcore.processes.transfer import pack_outcome, unpack_call

from ..settings import of_replicas

_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")


class Worlds:
    """Stands for torch's single ``_World``, with the fields of the rank that asks. It is not thread-local, because
    autograd's threads, one for each device, belong to the same ranks."""

    def __init__(self, fields: Callable[[], SimpleNamespace]) -> None:
        vars(self)["_fields"] = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask before there are fields
            raise AttributeError(name)
        return getattr(self._fields(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fields(), name, value)


def install(rank: Callable[[], int | None], size: int) -> Callable[[], None]:
    """Give each rank process groups of its own, which meet at one store. Returns what removes them all."""
    import torch_xla.distributed.xla_backend  # noqa: F401  registers "xla"

    groups, stores = dict[int | None, SimpleNamespace](), list[dist.Store]()

    def fields() -> SimpleNamespace:
        none = SimpleNamespace(default_pg=None, group_count=0, **{name: {} for name in _MAPS})
        return groups.setdefault(rank(), none)

    def meet(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[dist.Store, int | None, int]]:
        if not stores:
            stores.append(dist.HashStore())
        yield stores[0], rank(), size

    def forget() -> None:
        groups.clear()
        stores.clear()

    c10d._world = Worlds(fields)  # type: ignore[assignment]
    native_groups._set_thread_isolation_mode(True)  # one table of groups by name for each thread
    handlers = c10d.rendezvous.__globals__["_rendezvous_handlers"]
    for scheme in ("env", "xla"):
        handlers[scheme] = meet
    return forget


def serve(size: int, conn: Connection) -> None:
    settings.update(of_replicas(size, settings.environment()))
    import torch_xla
    import torch_xla.core.xla_model as xm

    from . import meeting_points as patches

    torch.set_num_threads(1)
    devices = xm.get_xla_supported_devices()
    xm.set_replication(torch_xla.device(), devices)  # makes xr.world_size() the number of replicas
    patches.install()
    forget_groups = install(patches.rank_here, size)
    excepthook = sys.excepthook
    gc.freeze()  # what was imported stays, and the collection after each run passes over it
    while True:
        try:
            call, timeout, env = conn.recv()
        except EOFError:
            return
        fn, args, kwargs = unpack_call(call)
        world = patches.ReplicaThreads(size)
        patches.running.append(world)
        job = {**env, settings.MASTER_ADDR.name: "127.0.0.1", settings.MASTER_PORT.name: "0"}
        one = partial(patches.as_rank, partial(_on_cpu, fn, *args, **kwargs), job)
        outcomes = world.run(one, timeout)
        patches.running.pop()
        broken = len(world.ended) < size
        conn.send((broken, [pack_outcome(o, r) for r, o in enumerate(outcomes)]))
        if broken:
            os._exit(1)  # a running thread cannot be stopped
        del world, one, fn, args, kwargs, outcomes  # and the objects in their errors' tracebacks
        forget_groups()
        sys.excepthook = excepthook  # each init of torch.distributed wraps the previous hook
        gc.collect()  # drops the unfinished graphs of a failed run, so that the next does not run them


def _on_cpu(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = fn(*args, **kwargs)
    return nested.mapped(lambda t: t.detach().cpu(), result)


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    serve(int(sys.argv[2]), Connection(int(sys.argv[3])))
    atexit._run_exitfuncs()  # finishes a background save of a checkpoint
    # skip the interpreter's shutdown, which takes seconds to free every compiled program
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
