"""The trainer of NeuronX Distributed, by its path: from a configuration to saved checkpoints."""

from .checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from .config import neuronx_distributed_config
from .model import NxDModel, initialize_parallel_model
from .optimizer import NxDOptimizer, initialize_parallel_optimizer

__all__ = [
    "NxDModel",
    "NxDOptimizer",
    "finalize_checkpoint",
    "has_checkpoint",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "save_checkpoint",
]
