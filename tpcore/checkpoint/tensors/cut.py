"""How a stored tensor is cut, and how a model's is."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ...context import ParallelContext
from ...layers.sharding import sharding
from ...shard import ShardSpec

Cut = ShardSpec | Literal["unknown"] | None
"""How a stored tensor is cut. None: nobody said, so it is whole, if all ranks hold the same."""


def spec_of(t: Tensor, ctx: ParallelContext, where: str) -> ShardSpec | None:
    """The cut of a parameter of a parallel layer, over the tp group; None for any other tensor."""
    found = sharding(t)
    if found is None:
        return None
    spec, n = found.layout.spec, ctx.mesh.axes.get("tp", 1)
    if not set(found.axes) <= {"tp"}:
        mine = found.ctx.comm(*found.axes).group.members(found.ctx.rank)
        tp = ctx.mesh.group("tp").members(ctx.rank) if n > 1 else (ctx.rank,)
        raise ValueError(
            f"{where} is cut over ranks {mine}; a checkpoint holds what is cut over the tp group {tp}"
        )
    if tuple(t.shape) != spec.local_shape(n):
        raise ValueError(
            f"{where} has shape {tuple(t.shape)}, but its layer cuts {spec} to {spec.local_shape(n)}"
        )
    return spec
