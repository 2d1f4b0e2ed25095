"""Collectives as operators of torch, so that they can stand in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tpcore.comm import Comm, Op, Pending
from tpcore.context import current

NAMESPACE = "tpcore_cpu_gloo"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def axes_of(comm: Comm) -> str:
    """How a graph names a group: by the axes of the mesh, which are the same in every process."""
    return ".".join(comm.group.axes)


def _comm(axes: str) -> Comm:
    return current().comm(*axes.split("."))


def _longer(x: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] * size, *x.shape[dim + 1 :]))


def _shorter(x: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :]))


# Name, schema, what it does, and the shape of what it returns. ``size`` is the group's, for the shape alone.
# ``donate`` is on record for ``fast`` below: an operator may not return its argument's memory.
_OPERATORS: Sequence[tuple[str, str, Callable[..., Tensor], Callable[..., Tensor]]] = (
    (
        "all_reduce",
        "(Tensor x, str op, bool donate, str axes) -> Tensor",
        lambda x, op, donate, axes: _comm(axes).all_reduce(x, op),
        lambda x, op, donate, axes: torch.empty_like(x, memory_format=torch.contiguous_format),
    ),
    (
        "all_gather",
        "(Tensor x, int dim, int size, str axes) -> Tensor",
        lambda x, dim, size, axes: _comm(axes).all_gather(x, dim),
        lambda x, dim, size, axes: _longer(x, dim, size),
    ),
    (
        "reduce_scatter",
        "(Tensor x, int dim, int size, str axes) -> Tensor",
        lambda x, dim, size, axes: _comm(axes).reduce_scatter(x, dim),
        lambda x, dim, size, axes: _shorter(x, dim, size),
    ),
    (
        "broadcast",
        "(Tensor x, int src, str axes) -> Tensor",
        lambda x, src, axes: _comm(axes).broadcast(x, src),
        lambda x, src, axes: torch.empty_like(x, memory_format=torch.contiguous_format),
    ),
)
for _name, _schema, _run, _shape in _OPERATORS:
    _LIBRARY.define(_name + _schema)
    torch.library.impl(f"{NAMESPACE}::{_name}", "CompositeExplicitAutograd", lib=_LIBRARY)(_run)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _shape, lib=_LIBRARY)


@contextmanager
def recorded(comm: Comm, rank: Tensor) -> Iterator[None]:
    """Within, ``comm`` puts operators into the graph that is being traced, and ``rank`` is its rank."""
    ops, axes, size = getattr(torch.ops, NAMESPACE), axes_of(comm), comm.size

    def all_reduce(x: Tensor, op: Op, donate: bool) -> Tensor:
        made: Tensor = ops.all_reduce(x, op, donate, axes)
        return made

    def start_all_reduce(x: Tensor, op: Op, donate: bool) -> Pending:
        made = all_reduce(x, op, donate)
        return lambda: made

    instead: dict[str, Any] = {
        "_all_reduce": all_reduce,
        "_start_all_reduce": start_all_reduce,
        "_all_gather": lambda x, dim: ops.all_gather(x, dim, size, axes),
        "_reduce_scatter": lambda x, dim: ops.reduce_scatter(x, dim, size, axes),
        "_broadcast": lambda x, src: ops.broadcast(x, src, axes),
    }
    with comm.position_as(rank):
        vars(comm).update(instead)
        try:
            yield
        finally:
            for name in instead:
                del vars(comm)[name]


def fast(comms: Mapping[str, Comm]) -> dict[str, Callable[..., Tensor]]:
    """What a loaded graph calls for each operator above: the same, without a dispatcher (10 us) and with
    leave to return the argument's memory. ``comms``: by the name that ``axes_of`` gave them."""

    def all_reduce(x: Tensor, op: Op, donate: bool, axes: str) -> Tensor:
        return comms[axes].all_reduce(x, op, donate=donate)

    def all_gather(x: Tensor, dim: int, size: int, axes: str) -> Tensor:
        return comms[axes].all_gather(x, dim)

    def reduce_scatter(x: Tensor, dim: int, size: int, axes: str) -> Tensor:
        return comms[axes].reduce_scatter(x, dim)

    def broadcast(x: Tensor, src: int, axes: str) -> Tensor:
        return comms[axes].broadcast(x, src)

    known = (all_reduce, all_gather, reduce_scatter, broadcast)
    return {f"{NAMESPACE}::{f.__name__}.default": f for f in known}
