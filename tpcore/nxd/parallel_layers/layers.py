"""The sharded layers under their NeuronX Distributed path."""

from ...layers import ColumnParallelLinear, RowParallelLinear
from ...layers.linear import ParallelLinear as BaseParallelLinear
from .sequence_first import SequenceFirstEmbedding as ParallelEmbedding
from .sequence_first import create_local_weight
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
