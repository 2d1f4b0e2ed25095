"""Published constructor arguments, each notion as one value."""

from __future__ import annotations

from collections.abc import Sequence

from ..shard import Block, ShardSpec
from .module import ParallelModule


def sequence_dim(enabled: bool, dim: int | None) -> int | None:
    """One value for the two published arguments; the published default dimension is 0."""
    if dim is not None and not enabled:
        raise ValueError(f"sequence_dimension={dim} without sequence_parallel_enabled=True has no meaning")
    return (0 if dim is None else dim) if enabled else None


def cut_features(
    layer: ParallelModule, name: str, stride: int, blocks: Sequence[Block] | None, pad: bool
) -> ShardSpec:
    """How the features of which a layer has ``name`` (``output_size``, say) are cut over its ranks."""
    what, size, n = type(layer).__name__, getattr(layer, name), layer.tp.size
    if blocks is None:
        spec = ShardSpec.strided((size,), 0, stride)
    else:
        parts = tuple(Block(*block) for block in blocks)
        if stride != 1:
            raise ValueError(
                f"{what}: stride={stride} and blocks={parts} both say how {name} is cut: pass one"
            )
        if sum(part.size for part in parts) != size:
            sizes = " + ".join(str(part.size) for part in parts) or "0"
            raise ValueError(f"{what}: blocks of {sizes} features are not {name}={size}")
        spec = ShardSpec((size,), 0, parts)
    if spec.padded(n) and not pad:
        parts_of = f" in {stride} parts" if stride > 1 else f" in {blocks}" if blocks is not None else ""
        raise ValueError(
            f"{what}: {name}={size}{parts_of} is not divisible by tp={n}; "
            "pass pad=True to pad it with zeros that never show"
        )
    return spec
