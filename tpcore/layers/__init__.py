"""Sharded layers, one family per file."""

from .attention import ParallelQKV
from .context_parallel import ContextParallelAttention
from .conv1d import ColumnParallelConv1D, RowParallelConv1D
from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .module import move_model_to_device
from .norm import LayerNorm, RMSNorm
from .sharding import shard_specs
from .shared_input import share_input

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
