"""Sharded layers: one family a file."""

from .conv1d import ColumnParallelConv1D, RowParallelConv1D
from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import LayerNorm, RMSNorm

__all__ = [
    "ColumnParallelConv1D",
    "ColumnParallelLinear",
    "LayerNorm",
    "ParallelEmbedding",
    "RMSNorm",
    "RowParallelConv1D",
    "RowParallelLinear",
]
