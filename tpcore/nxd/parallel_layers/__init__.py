"""The import paths of NeuronX Distributed's layers: the same objects as in tpcore, under their old names."""

from . import checkpointing, grads, layer_norm, layers, loss_functions, mappings, parallel_state, random, utils
from .checkpointing import load, save
from .grads import clip_grad_norm
from .layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from .loss_functions import parallel_cross_entropy
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .parallel_state import initialize_model_parallel
from .random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from .utils import copy_tensor_model_parallel_attributes, move_model_to_device, split_tensor_along_last_dim

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "checkpointing",
    "clip_grad_norm",
    "copy_tensor_model_parallel_attributes",
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_xla_rng_tracker",
    "grads",
    "initialize_model_parallel",
    "layer_norm",
    "layers",
    "load",
    "loss_functions",
    "mappings",
    "model_parallel_xla_manual_seed",
    "move_model_to_device",
    "parallel_cross_entropy",
    "parallel_state",
    "random",
    "reduce_from_tensor_model_parallel_region",
    "save",
    "scatter_to_tensor_model_parallel_region",
    "split_tensor_along_last_dim",
    "utils",
]
