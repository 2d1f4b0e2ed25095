"""The embedding of published scripts, which puts the sequence first, and the slicing that they do by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers import ParallelEmbedding
from ...layout.shard import ShardSpec
from ...runtime.context import current


class SequenceFirstEmbedding(ParallelEmbedding):
    """``tpcore.ParallelEmbedding`` for ids of ``[batch, sequence]`` in models whose activations are
    ``[sequence, batch, hidden]``.

    With ``sequence_parallel_enabled=True`` and no ``sequence_dimension``, or 0, the output is
    ``[sequence / tp, batch, hidden]``: this rank's tokens of every sample. ``sequence_dimension=1`` gives
    ``[batch, sequence / tp, hidden]``. Without sequence parallelism nothing differs.
    """

    def forward(self, ids: Tensor) -> Tensor:
        if self.sequence_dim == 0 and ids.ndim == 2:
            ids = ids.transpose(0, 1).contiguous()
        return super().forward(ids)


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
