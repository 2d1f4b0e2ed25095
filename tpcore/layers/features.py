"""Features of one dim over a layer's ranks: their sharding from constructor arguments, index tables, copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..layout.shard import Block, ShardSpec
from ..runtime.context import current
from .module import ParallelModule

Index = NDArray[np.int64]


def unpadded(t: Tensor) -> int | None:
    """The number of features of all ranks, if ``t`` is the output of a layer with padding; None for any other."""
    features = getattr(t, ops.FEATURES, None)
    return features.size if features is not None and features.padded else None


def on(device: torch.device, table: NDArray[Any]) -> Tensor:
    """``table`` on ``device``, in the order of its queue: the host does not wait for what is before it there."""
    return torch.from_numpy(table).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Features:
    """Index tables of one cut, computed once: computing them in each forward took 62 us at tp=32.

    They are arrays, because a tensor made under inference_mode or while tracing is unusable afterwards.
    """

    size: int
    padded: bool = False
    order: Index | None = None
    """Position of each feature in the concatenation of all ranks' features; None if unchanged."""
    spread: Index | None = None
    """The feature at each position of that concatenation. Positions of padding name any feature."""
    filled: NDArray[np.bool_] | None = None
    """[ranks, features of one rank]: False for padding. None without padding."""

    @classmethod
    def of(cls, spec: ShardSpec, n: int) -> Features:
        """The tables of ``spec``, a spec of this dim alone, over ``n`` ranks."""
        (size,) = spec.shape
        if n == 1 or spec.dim is None or spec.contiguous(n):
            return cls(size)
        order, source = spec.gathered_index(n).numpy(), spec.source_index(n).numpy()
        padded, in_order = spec.padded(n), np.array_equal(order, np.arange(size))
        spread = source.clip(min=0).reshape(-1)
        return cls(size, padded, None if in_order else order, spread, source >= 0 if padded else None)

    def restored(self, y: Tensor) -> Tensor:
        """Gathered features in their unsharded order, without padding."""
        if self.order is not None:
            return y.index_select(-1, on(y.device, self.order))
        return y.narrow(-1, 0, self.size) if self.padded else y

    def gathered(self, y: Tensor, comm: Comm) -> Tensor:
        """The features of all ranks, of this rank's."""
        return self.restored(ops.collect(y, comm))

    def scatter(self, x: Tensor, comm: Comm) -> Tensor:
        """This rank's features. Padding holds arbitrary features, which ``mask`` clears."""
        if self.spread is not None:
            x = x.index_select(-1, on(x.device, self.spread))
        return ops.scatter(x, comm)

    def mask(self, x: Tensor, comm: Comm) -> Tensor:
        """``x`` with this rank's padding zeroed, in backward too. The rank is data, not a Python constant."""
        if self.filled is None:
            return x
        filled = on(x.device, self.filled).index_select(0, comm.position).squeeze(0)
        return x * filled.to(x.dtype)


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
    layer_type, size, n = type(layer).__name__, getattr(layer, name), layer.tp.size
    if isinstance(blocks, int):
        spec, parts_of = ShardSpec.strided((size,), 0, blocks), f" in {blocks} parts" if blocks > 1 else ""
    else:
        parts = tuple(Block(*block) for block in blocks)
        if sum(part.size for part in parts) != size:
            sizes = " + ".join(str(part.size) for part in parts) or "0"
            raise ValueError(f"{layer_type}: blocks of {sizes} features are not {name}={size}")
        kinds = [f"{b.size}" + (f" ({b.size // b.unit} units of {b.unit})" if b.unit > 1 else "") for b in parts]
        spec, parts_of = ShardSpec((size,), 0, parts), f" in blocks of {', '.join(dict.fromkeys(kinds))}"
    if spec.padded(n) and not pad:
        raise ValueError(
            f"{layer_type}: {name}={size}{parts_of} is not divisible by tp={n}; pass pad=True to pad it with zeros"
        )
    if spec.padded(n) and name != "embedding_dim":  # what operations make of these parts has no mark
        layer.tp.padded.add(spec.local_shape(n)[0])
    return spec


def check_tokens_dim(layer: ParallelModule, dim: int | None, ndim: int) -> None:
    """Raise ValueError unless ``dim``, of an activation of ``ndim`` dims whose last one has the features, is another
    one of them: along the features each rank would get a part of these, of every token."""
    if dim is not None and not (-ndim <= dim < ndim - 1 and dim != -1):
        raise ValueError(
            f"{type(layer).__name__}(sequence_dim={dim}): an activation of {ndim} dims has its features along the last "
            f"one, and its tokens along one of dims {[*range(ndim - 1)]}"
        )


def refuse_width(layer: ParallelModule, in_features: int, x: Tensor, takes: int, parallel: bool | None = None) -> None:
    """Raise ValueError with both sizes. ``takes``: the features that ``layer`` takes on this rank, of
    ``in_features``. ``parallel``: ``input_is_parallel`` of a row layer, None for a column layer."""
    layer_type, tp, has = type(layer).__name__, layer.tp.size, x.shape[-1]
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
        f"{layer_type}: the input of shape {tuple(x.shape)} has {has} features, and the layer takes {takes}"
        + (f" of in_features={in_features} on each rank" if parallel else "")
        + remedy
    )


@dataclass(frozen=True)
class Copies:
    """Sums the gradients of a parameter's replicated runs over the ranks that hold them: each rank computes with its
    own copy and gets only part of the gradient, so that the copies would differ after the first step."""

    runs: tuple[tuple[int, Comm | None], ...]  # along the cut dim: length, and the ranks to sum over
    dtype: torch.dtype  # lowest precision for the sum

    @classmethod
    def of(cls, cut: ShardSpec, layer: ParallelModule, dtype: torch.dtype) -> Copies | None:
        """The copies in ``layer``, or None if there are none. ``cut``: the spec of its cut dim alone."""
        n = layer.tp.size
        copies = cut.block_copies(n)
        if max(copies, default=1) == 1:
            return None
        lengths = [ShardSpec((block.size,), 0, (block,)).local_shape(n)[0] for block in cut.blocks]
        runs = []
        # adjacent blocks with the same number of copies (k and v) share one collective
        for count, blocks in groupby(zip(copies, lengths, strict=True), key=lambda block: block[0]):
            comm = None if count == 1 else layer.comm_within(count)
            runs.append((sum(length for _, length in blocks), comm))
        return cls(tuple(runs), dtype)

    def __call__(self, parameter: Tensor, dim: int) -> Tensor:
        """``parameter``, cut along ``dim``, for use in a forward. Backward sums the gradients."""
        parts = parameter.split([length for length, _ in self.runs], dim)
        copies = [
            part if comm is None else ops.copy(part, comm, dtype=self.dtype)
            for part, (_, comm) in zip(parts, self.runs, strict=True)
        ]
        return copies[0] if len(copies) == 1 else torch.cat(copies, dim)
