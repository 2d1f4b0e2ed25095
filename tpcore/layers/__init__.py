"""Sharded layers, one family per file."""

from .attention import ParallelQKV, share_input
from .context_parallel import ContextParallelAttention
from .embedding import ParallelEmbedding
from .linear import ColumnParallelConv1D, ColumnParallelLinear, RowParallelConv1D, RowParallelLinear
from .module import move_model_to_device
from .norm import LayerNorm, RMSNorm
from .sharding import shard_specs

__all__ = [
    "ColumnParallelConv1D",
    "ColumnParallelLinear",
    "ContextParallelAttention",
    "LayerNorm",
    "ParallelEmbedding",
    "ParallelQKV",
    "RMSNorm",
    "RowParallelConv1D",
    "RowParallelLinear",
    "move_model_to_device",
    "shard_specs",
    "share_input",
]
