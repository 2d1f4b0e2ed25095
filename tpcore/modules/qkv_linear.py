"""Query, key and value projections, by their NeuronX Distributed path."""

from ..integrations.nxd.qkv import GQAQKVColumnParallelLinear

__all__ = ["GQAQKVColumnParallelLinear"]
