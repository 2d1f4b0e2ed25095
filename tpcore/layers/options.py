"""Constructor arguments of several layers, checked and turned into one value per notion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..layout.shard import Block, ShardSpec
from ..runtime.context import current
from .features import note_padding
from .module import ParallelModule


def sequence_dim(enabled: bool, dim: int | None) -> int | None:
    """One value for the two public arguments: the sequence dimension (0 by default), or None."""
    if dim is not None and not enabled:
        raise ValueError(f"sequence_dimension={dim} without sequence_parallel_enabled=True has no meaning")
    return (0 if dim is None else dim) if enabled else None


@dataclass(frozen=True)
class Tokens:
    """Sequence parallelism over some of a layer's ranks. Chunks along ``dim`` are spread over ``over``, and
    the ranks of ``rest`` hold the same chunk. Collectives over ``rest`` move only chunks."""

    dim: int
    over: Comm
    rest: Comm

    def gathered(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's chunk -> all tokens, one copy per rank of the layer."""
        return ops.all_gather(ops.copy(x, self.rest, dtype=dtype), self.over, self.dim, dtype=dtype)

    def summed(self, y: Tensor) -> Tensor:
        """Partial sums of all tokens -> this rank's chunk of the sum."""
        return ops.reduce(ops.reduce_scatter(y, self.over, self.dim), self.rest)


def tokens_over(layer: ParallelModule, dim: int | None, group: Any) -> Tokens | None:
    """The tokens of a layer that are spread over ``group``; None if ``group`` is None or has all the layer's
    ranks. A collective call, for it makes groups. ValueError if ``group`` is no part of the layer's group."""
    if group is None:
        return None
    what, ctx = type(layer).__name__, current()
    over = ctx.comm_for(group)
    if dim is None:
        raise ValueError(f"{what}: sequence_parallel_group without sequence_parallel_enabled has no meaning")
    mine, theirs = layer.tp.group.axes, over.group.axes
    if not set(theirs) <= set(mine) & set(ctx.mesh.axes):
        raise ValueError(f"{what} is cut over {mine}, and its tokens over {theirs}, which is no part of that")
    rest = [axis for axis in mine if axis not in theirs]
    return Tokens(dim, over, ctx.comm(*rest)) if rest else None


def cut_features(
    layer: ParallelModule, name: str, stride: int, blocks: Sequence[Block] | None, pad: bool, unit: int = 1
) -> ShardSpec:
    """The spec of a layer's features. ``name``: the attribute with their number, such as ``output_size``."""
    what, size, n = type(layer).__name__, getattr(layer, name), layer.tp.size
    if blocks is None:
        spec = ShardSpec.strided((size,), 0, stride)
        part = size // stride
        if unit < 1 or part % unit:
            raise ValueError(f"{what}: {name}={size}{_parts(stride)} is no whole number of units of {unit}")
        if unit > 1:
            spec = ShardSpec((size,), 0, (Block(part, unit),) * stride)
    elif unit != 1:
        raise ValueError(f"{what}: unit={unit} and blocks={tuple(blocks)} both say what stays whole: pass one")
    else:
        parts = tuple(Block(*block) for block in blocks)
        if stride != 1:
            raise ValueError(f"{what}: stride={stride} and blocks={parts} both say how {name} is cut: pass one")
        if sum(part.size for part in parts) != size:
            sizes = " + ".join(str(part.size) for part in parts) or "0"
            raise ValueError(f"{what}: blocks of {sizes} features are not {name}={size}")
        spec = ShardSpec((size,), 0, parts)
    if spec.padded(n) and not pad:
        parts_of = _parts(stride) if blocks is None else f" in {blocks}"
        units = f", {size // stride // unit} units of {unit}," if unit > 1 else ""
        raise ValueError(
            f"{what}: {name}={size}{parts_of}{units} is not divisible by tp={n}; pass pad=True to pad it with zeros"
        )
    note_padding(spec, layer.tp)
    return spec


def _parts(stride: int) -> str:
    return f" in {stride} parts" if stride > 1 else ""
