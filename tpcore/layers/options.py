"""Constructor arguments of several layers, checked and turned into one value per notion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..layout.shard import Block, ShardSpec
from ..runtime.context import current
from .features import note_padding
from .module import ParallelModule

Blocks = int | Sequence[Block]
"""A number of equal projections, fused along the sharded features, or each projection's block."""


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


def tokens_over(layer: ParallelModule, dim: int | None) -> Tokens | None:
    """The tokens of a layer that is sharded over pipeline stages too: no stage has tokens of its own. None if
    all ranks of the layer have. A collective call, for it makes groups."""
    axes = layer.tp.group.axes
    if dim is None or "pp" not in axes:
        return None
    ctx = current()
    return Tokens(dim, ctx.comm(*(axis for axis in axes if axis != "pp")), ctx.comm("pp"))


def cut_features(layer: ParallelModule, name: str, blocks: Blocks, pad: bool) -> ShardSpec:
    """The spec of a layer's features. ``name``: the attribute with their number, such as ``out_features``."""
    what, size, n = type(layer).__name__, getattr(layer, name), layer.tp.size
    if isinstance(blocks, int):
        spec, parts_of = ShardSpec.strided((size,), 0, blocks), f" in {blocks} parts" if blocks > 1 else ""
    else:
        parts = tuple(Block(*block) for block in blocks)
        if sum(part.size for part in parts) != size:
            sizes = " + ".join(str(part.size) for part in parts) or "0"
            raise ValueError(f"{what}: blocks of {sizes} features are not {name}={size}")
        kinds = [f"{b.size}" + (f" ({b.size // b.unit} units of {b.unit})" if b.unit > 1 else "") for b in parts]
        spec, parts_of = ShardSpec((size,), 0, parts), f" in blocks of {', '.join(dict.fromkeys(kinds))}"
    if spec.padded(n) and not pad:
        raise ValueError(
            f"{what}: {name}={size}{parts_of} is not divisible by tp={n}; pass pad=True to pad it with zeros"
        )
    note_padding(spec, layer.tp)
    return spec


def refuse_width(layer: ParallelModule, in_features: int, x: Tensor, takes: int, parallel: bool | None = None) -> None:
    """Raise ValueError with both sizes. ``takes``: the features that ``layer`` takes on this rank, of
    ``in_features``. ``parallel``: ``input_is_parallel`` of a row layer, None for a column layer."""
    what, tp, has = type(layer).__name__, layer.tp.size, x.shape[-1]
    remedy = ""
    if parallel and has == in_features:
        remedy = "; these are the features of all ranks: leave out input_is_parallel=True, which takes a part"
    elif not parallel and has * tp == in_features:
        remedy = f"; {has} is the part of one of tp={tp} ranks: " + (
            "gather it first (gather_output=True in the layer before, or tpcore.comm.mappings.gather), or "
            "use a RowParallelLinear with input_is_parallel=True"
            if parallel is None
            else "pass input_is_parallel=True"
        )
    raise ValueError(
        f"{what}: the input of shape {tuple(x.shape)} has {has} features, and the layer takes {takes}"
        + (f" of in_features={in_features} on each rank" if parallel else "")
        + remedy
    )
