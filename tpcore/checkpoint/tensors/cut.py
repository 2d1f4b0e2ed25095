"""How a stored tensor is cut, and how a model's is."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ...context import ParallelContext
from ...layers.sharding import sharding
from ...layout import Layout

Cut = Layout | Literal["unknown"] | None
"""How a stored tensor is cut. None: nobody said, so it is whole, if all ranks hold the same."""

COPIED = "dp"
"""The axis on which a checkpoint holds one copy: its ranks share a directory."""


def layout_of(t: Tensor, ctx: ParallelContext, where: str) -> Layout | None:
    """The layout of a parameter of a parallel layer; None for any other tensor."""
    found = sharding(t)
    if found is None:
        return None
    layout, mesh = found.layout, found.ctx.mesh
    if found.axes and (COPIED in found.axes or not set(found.axes) <= set(ctx.mesh.axes)):
        mine = found.ctx.comm(*found.axes).group.members(found.ctx.rank)
        held = [axis for axis in ctx.mesh.axes if axis != COPIED]
        raise ValueError(
            f"{where} is cut over ranks {mine} of {found.axes}; a checkpoint holds what is cut over {held}"
        )
    if tuple(t.shape) != layout.local_shape(mesh):
        raise ValueError(
            f"{where} has shape {tuple(t.shape)}, but its layer cuts {layout} to {layout.local_shape(mesh)}"
        )
    return layout
