"""The sharded layers under their NeuronX Distributed path."""

from ..integrations.nxd.layers import SequenceFirstEmbedding as ParallelEmbedding
from ..integrations.nxd.layers import create_local_weight
from ..layers import ColumnParallelLinear, RowParallelLinear
from ..layers.linear import ParallelLinear as BaseParallelLinear
from .utils import copy_tensor_model_parallel_attributes, param_is_not_tensor_parallel_duplicate

__all__ = [
    "BaseParallelLinear",
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "copy_tensor_model_parallel_attributes",
    "create_local_weight",
    "param_is_not_tensor_parallel_duplicate",
]
