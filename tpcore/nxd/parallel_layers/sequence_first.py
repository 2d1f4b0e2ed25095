"""The sequence-first order of published scripts, and the slicing that they do by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout.shard import ShardSpec
from ...runtime.context import current


def tokens_first(ids: Tensor) -> Tensor:
    """Ids of ``[batch, sequence]`` as ``[sequence, batch]``; others as they are."""
    return ids.transpose(0, 1).contiguous() if ids.ndim == 2 else ids


@torch.no_grad()
def create_local_weight(
    full_weight: Tensor,
    partition_dim: int,
    per_partition_size: int,
    stride: int,
    out_weight: Tensor | None = None,
) -> Tensor:
    """This tp rank's shard of ``full_weight`` along ``partition_dim``, of ``stride`` fused parts each.

    Into ``out_weight`` if given. ValueError where tp shards of ``per_partition_size`` are not the whole.
    """
    tp = current().comm("tp")
    spec = ShardSpec.strided(tuple(full_weight.shape), partition_dim, stride)
    rank = tp.group.members(current().rank).index(current().rank)
    if per_partition_size * tp.size != full_weight.shape[partition_dim]:
        raise ValueError(
            f"create_local_weight: {tp.size} shards of {per_partition_size} are not dim {partition_dim} of "
            f"shape {tuple(full_weight.shape)}"
        )
    local = spec.shard(full_weight, rank, tp.size)
    return local if out_weight is None else out_weight.copy_(local)
