"""The sharding of a parameter on a mesh, stored as an attribute of the parameter."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.layout import Layout
from ..layout.shard import ShardSpec
from ..layout.slices import Share
from ..runtime.context import ParallelContext
from ..runtime.guards import IN_FILE
from .initial import Init, initial_part


@dataclass(frozen=True)
class Sharding:
    """A parameter's layout, and the context of its mesh, which has the rank and the Comms over any axes."""

    layout: Layout
    ctx: ParallelContext

    def __deepcopy__(self, memo: object) -> Sharding:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.save and pickle ask for it with the tensor that has this mark: of the whole it is plain data
        if self.axes:
            raise ValueError(IN_FILE.format(self.local_shape, self.layout.shape))
        return OrderedDict, (list(self.layout.to_json().items()),)

    # cached: every step reads these for every parameter
    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes along which the ranks hold different entries."""
        return self.layout.axes_on(self.ctx.mesh)

    def initial(self, init: Init, dtype: torch.dtype) -> Tensor:
        """This rank's part of what ``init`` fills the whole with."""
        return initial_part(init, self.layout, self.ctx.rank, self.ctx.mesh, dtype)

    @torch.no_grad()
    def whole(self, part: Tensor) -> Tensor:
        """The whole of which each rank has a ``part``, on the CPU. Collective over the ranks that have its parts."""
        layout = replace(self.layout, slot=None)  # of a stage: its ranks gather
        if not layout.axes_on(self.ctx.mesh):
            return part.cpu().clone()
        if "ep" in layout.axes:
            part, layout = self.ctx.comm("ep").all_gather(part, 0), layout.without("ep")
        parts = self.ctx.comm(*layout.axes).all_gather(part.unsqueeze(0), 0).cpu()
        return layout.spec.unshard(list(parts))

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of the ``whole``."""
        return self.layout.shard(whole, self.ctx.rank, self.ctx.mesh)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.ctx.mesh)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """The rectangles of the local tensor, each with the number of ranks that hold it."""
        return self.layout.shares(self.ctx.mesh)


class ForeignMarks:
    """How scripts of another library mark what they have sharded themselves. ``sharding`` asks each class derived from
    this one that is imported."""

    @staticmethod
    def read(tensor: Tensor, known: Sharding | None) -> Sharding | None:
        """The sharding of ``tensor`` by its marks, added to what is ``known``. ValueError where they contradict it."""
        return known


def sharding(tensor: Tensor) -> Sharding | None:
    """The sharding of a parameter (or state_dict entry) of a parallel layer, or of one that a script has sharded and
    marked itself; None for any other tensor."""
    known = stamped(tensor)
    for marks in ForeignMarks.__subclasses__():
        known = marks.read(tensor, known)
    return known


def stamped(tensor: Tensor) -> Sharding | None:
    """What ``stamp`` has set."""
    mark = getattr(tensor, "tpcore_sharding", None)
    return mark if isinstance(mark, Sharding) else None


def stamp(tensor: Tensor, mark: Sharding) -> None:
    """Set the sharding of ``tensor``, by an attribute of it."""
    tensor.tpcore_sharding = mark  # type: ignore[attr-defined]


def layouts(model: nn.Module) -> dict[str, Layout]:
    """The layout of every state_dict entry. Entries that no parallel layer owns are replicated."""
    by_name = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if isinstance(t, Tensor):  # a module's extra state need not be
            mark = sharding(t)
            by_name[name] = mark.layout if mark else Layout(tuple(t.shape))
    return by_name


def shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """The spec of every state_dict entry. Entries that no parallel layer owns are replicated."""
    return {name: layout.spec for name, layout in layouts(model).items()}
