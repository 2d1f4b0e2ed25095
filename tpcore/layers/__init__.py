"""Sharded layers, one family per file."""

from .attention import ParallelQKV, share_input
from .context_parallel import ContextParallelAttention
from .embedding import ParallelEmbedding
from .linear import ColumnParallelConv1D, ColumnParallelLinear, RowParallelConv1D, RowParallelLinear
from .loss import parallel_cross_entropy, parallel_log_softmax
from .module import move_model_to_device
from .norm import LayerNorm, RMSNorm
from .sharding import shard_specs
from .vocabulary import gather_logits, parallel_entropy, parallel_kl_div, parallel_logsumexp

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
    "gather_logits",
    "move_model_to_device",
    "parallel_cross_entropy",
    "parallel_entropy",
    "parallel_kl_div",
    "parallel_log_softmax",
    "parallel_logsumexp",
    "shard_specs",
    "share_input",
]
