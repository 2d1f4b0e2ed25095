"""Collectives as operators of torch, so that they can stand in a graph: one for each primitive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tpcore.backend.programs import comm_named, group_name
from tpcore.comm import Comm
from tpcore.context import current
from tpcore.relay import Relay
from tpcore.transport import TABLE, Primitive

NAMESPACE = "tpcore_cpu_gloo"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _schema(primitive: Primitive) -> str:
    """The primitive's arguments, the group's size where the shape of the result needs it, and its name."""
    size = {} if primitive.shape is None else {"size": "int"}
    parameters = {"x": "Tensor", **primitive.arguments, **size, "axes": "str"}
    return f"({', '.join(f'{kind} {name}' for name, kind in parameters.items())}) -> Tensor"


def _run(primitive: Primitive) -> Callable[..., Tensor]:
    def run(x: Tensor, *given: Any) -> Tensor:
        named = dict(zip(primitive.arguments, given, strict=False))
        if (
            "donate" in named
        ):  # it is on record for ``fast``: an operator may not return its argument's memory
            named["donate"] = False
        made: Tensor = getattr(comm_named(current(), given[-1]), primitive.name)(x, **named)
        return made

    return run


def _shape(primitive: Primitive) -> Callable[..., Tensor]:
    count = len(primitive.arguments)

    def shape(x: Tensor, *given: Any) -> Tensor:
        return primitive.result(x, 0 if primitive.shape is None else given[count], *given[:count])

    return shape


for _primitive in TABLE:
    _LIBRARY.define(_primitive.name + _schema(_primitive))
    _name = f"{NAMESPACE}::{_primitive.name}"
    torch.library.impl(_name, "CompositeExplicitAutograd", lib=_LIBRARY)(_run(_primitive))
    torch.library.register_fake(_name, _shape(_primitive), lib=_LIBRARY)


class Operators(Relay):
    """Puts operators into the graph that is being traced."""

    def __init__(self, comm: Comm) -> None:
        self.group, self.size, self.position = comm.group, comm.size, comm.position
        self._operators, self._name = getattr(torch.ops, NAMESPACE), group_name(comm.group)

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        size = () if primitive.shape is None else (self.size,)
        made: Tensor = getattr(self._operators, primitive.name)(x, *arguments, *size, self._name)
        return made


def fast(comms: Mapping[str, Comm]) -> dict[str, Callable[..., Tensor]]:
    """What a loaded graph calls for each operator above: the same, without a dispatcher (10 us) and with
    leave to return the argument's memory. ``comms``: by the names of their groups."""

    def call(primitive: Primitive) -> Callable[..., Tensor]:
        methods = {name: getattr(comm, primitive.name) for name, comm in comms.items()}
        names = tuple(primitive.arguments)

        def run(x: Tensor, *given: Any) -> Tensor:
            made: Tensor = methods[given[-1]](x, **dict(zip(names, given, strict=False)))
            return made

        return run

    return {f"{NAMESPACE}::{p.name}.default": call(p) for p in TABLE}
