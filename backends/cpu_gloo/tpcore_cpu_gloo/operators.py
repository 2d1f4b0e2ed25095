"""The collectives of traced programs: torch operators, under the names in the programs' files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tpcore.backend.programs import comm_named, group_name
from tpcore.comm.comm import Comm
from tpcore.comm.operators import Operators, Place, define
from tpcore.comm.transport import TABLE, Primitive
from tpcore.runtime.context import current

NAMESPACE = "tpcore_cpu_gloo"
LIBRARY = define(NAMESPACE, lambda name: comm_named(current(), name))


def operators(comm: Comm) -> Operators:
    """The operators for the collectives of ``comm`` in the graph that is being traced."""
    return Operators(NAMESPACE, group_name(comm.group), Place(comm.group, comm.size, comm.position))


def fast(comms: Mapping[str, Comm]) -> dict[str, Callable[..., Tensor]]:
    """The functions that a loaded graph calls in place of the operators: they skip the dispatcher (10 us) and
    may return the argument's memory. ``comms``: by the names of their groups."""

    def call(primitive: Primitive) -> Callable[..., Tensor]:
        methods = {name: getattr(comm, primitive.name) for name, comm in comms.items()}
        names = tuple(primitive.arguments)

        def run(x: Tensor, *given: Any) -> Tensor:
            made: Tensor = methods[given[-1]](x, **dict(zip(names, given, strict=False)))
            return made

        return run

    return {f"{NAMESPACE}::{p.name}.default": call(p) for p in TABLE}
