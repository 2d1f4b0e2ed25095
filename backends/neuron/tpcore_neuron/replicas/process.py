"""The process of the replicas: ``python -m tpcore_neuron.replicas.process LIFELINE WORLD FD``."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from tpcore import settings
from tpcore.processes.spawn import follow
from tpcore.processes.transfer import pack_outcome, unpack_call

from ..settings import of_replicas


def serve(size: int, conn: Connection) -> None:
    settings.update(of_replicas(size, settings.environment()))
    import torch_xla
    import torch_xla.core.xla_model as xm

    from . import meeting_points as patches
    from . import torch_groups as groups
    from .scheduler import Scheduler

    torch.set_num_threads(1)
    devices = xm.get_xla_supported_devices()
    xm.set_replication(torch_xla.device(), devices)  # makes xr.world_size() the number of replicas
    patches.install()
    worlds = groups.install(patches.rank_here, size)
    excepthook = sys.excepthook
    gc.freeze()  # what was imported stays, and the collection after each run passes over it
    while True:
        try:
            call, timeout, env = conn.recv()
        except EOFError:
            return
        fn, args, kwargs = unpack_call(call)
        world = Scheduler(size, timeout)
        patches.running.append(patches.Run(world, []))

        one = partial(patches.as_rank, partial(_on_cpu, fn, *args, **kwargs))
        store = {settings.MASTER_ADDR.name: "127.0.0.1", settings.MASTER_PORT.name: "0"}
        outcomes = world.run(one, [{**env, **settings.of_rank(rank, size), **store} for rank in range(size)])
        patches.running.pop()
        conn.send((world.broken, [pack_outcome(o, r) for r, o in enumerate(outcomes)]))
        if world.broken:
            os._exit(1)  # a running thread cannot be stopped
        del world, one, fn, args, kwargs, outcomes  # and the objects in their errors' tracebacks
        worlds.forget()
        sys.excepthook = excepthook  # each init of torch.distributed wraps the previous hook
        gc.collect()  # drops the unfinished graphs of a failed run, so that the next does not run them


def _on_cpu(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = fn(*args, **kwargs)
    return _pytree.tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, result)


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    serve(int(sys.argv[2]), Connection(int(sys.argv[3])))
    atexit._run_exitfuncs()  # finishes a background save of a checkpoint
    # skip the interpreter's shutdown, which takes seconds to free every compiled program
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
