"""Sharded layers: one family a file."""

from .embedding import ParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import LayerNorm, RMSNorm

__all__ = ["ColumnParallelLinear", "LayerNorm", "ParallelEmbedding", "RMSNorm", "RowParallelLinear"]
