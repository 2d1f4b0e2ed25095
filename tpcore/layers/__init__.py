"""Sharded layers, one family per file."""

from .attention import ParallelQKV
from .conv1d import ColumnParallelConv1D, RowParallelConv1D
from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import LayerNorm, RMSNorm
from .shared_input import share_input

__all__ = [
    "ColumnParallelConv1D",
    "ColumnParallelLinear",
    "LayerNorm",
    "ParallelEmbedding",
    "ParallelQKV",
    "RMSNorm",
    "RowParallelConv1D",
    "RowParallelLinear",
    "share_input",
]
