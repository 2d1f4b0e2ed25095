"""The trainer of NeuronX Distributed, by its path: from a configuration to saved checkpoints."""

from ..paths import mirror
from .checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from .model import (
    NxDModel,
    NxDOptimizer,
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)

__all__ = ["NxDModel", "NxDOptimizer", "initialize_parallel_model", "initialize_parallel_optimizer"]
__all__ += ["finalize_checkpoint", "has_checkpoint", "load_checkpoint", "neuronx_distributed_config", "save_checkpoint"]

mirror(__name__, "trainer.trainer")
