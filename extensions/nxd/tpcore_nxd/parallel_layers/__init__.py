"""The import paths of NeuronX Distributed's layers: the same objects as in tpcore, under their old names."""

from .. import marks as marks  # of scripts that import it, marks on parameters are read
from . import attributes, checkpointing, grads, layers, mappings, parallel_state, utils
from .checkpointing import load, save
from .grads import clip_grad_norm
from .layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .parallel_state import initialize_model_parallel
from .utils import (
    copy_tensor_model_parallel_attributes,
    get_xla_rng_tracker,
    model_parallel_xla_manual_seed,
    move_model_to_device,
    parallel_cross_entropy,
    split_tensor_along_last_dim,
)

layer_norm, loss_functions, random = attributes, utils, utils  # by their paths in NeuronX Distributed
PARALLEL_MODULES, PARALLEL_FUNCTIONS = (
    [ColumnParallelLinear, RowParallelLinear, ParallelEmbedding],
    [parallel_cross_entropy],
)
"""What a tracer of the script's own leaves whole."""

__all__ = ["PARALLEL_FUNCTIONS", "PARALLEL_MODULES"]
__all__ += ["checkpointing", "grads", "layer_norm", "layers", "loss_functions", "mappings", "parallel_state", "random"]
__all__ += ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "load", "parallel_cross_entropy", "save"]
__all__ += ["copy_to_tensor_model_parallel_region", "gather_from_tensor_model_parallel_region"]
__all__ += ["reduce_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region"]
__all__ += ["clip_grad_norm", "copy_tensor_model_parallel_attributes", "get_xla_rng_tracker"]
__all__ += ["initialize_model_parallel", "model_parallel_xla_manual_seed", "move_model_to_device"]
__all__ += ["split_tensor_along_last_dim", "utils"]
