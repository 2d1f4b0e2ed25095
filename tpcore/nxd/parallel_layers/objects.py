"""Python objects of the ranks of a group, collected on its first rank."""

from __future__ import annotations

import pickle
from typing import Any

from ...runtime.consensus import gather_bytes
from ...runtime.context import current


def gather_python_object(obj: Any, group: Any = None) -> list[Any]:
    """The ``obj`` of every rank of the group on its first rank, in group order; ``[]`` on the others.

    ``group``: as in ``parallel_layers.mappings``; None is the tp group. ``obj``: what pickle takes. Only
    bytes of this job's own ranks are unpickled. Collective over the group.
    """
    ctx = current()
    comm = ctx.comm_for(group)
    found = gather_bytes(pickle.dumps(obj), comm)
    first = comm.group.members(ctx.rank)[0] == ctx.rank
    return [pickle.loads(data) for data in found] if first else []
