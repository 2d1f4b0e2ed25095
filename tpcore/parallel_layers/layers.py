"""The sharded layers under their NeuronX Distributed path."""

from ..integrations.nxd.layers import SequenceFirstEmbedding as ParallelEmbedding
from ..integrations.nxd.layers import create_local_weight
from ..layers import ColumnParallelLinear, RowParallelLinear
from ..layers.linear import ParallelLinear as BaseParallelLinear

__all__ = [
    "BaseParallelLinear",
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "create_local_weight",
]
