"""Configuration, model and optimizer by their full path."""

from ..integrations.nxd.config import neuronx_distributed_config
from ..integrations.nxd.model import initialize_parallel_model
from ..integrations.nxd.optimizer import initialize_parallel_optimizer

__all__ = ["initialize_parallel_model", "initialize_parallel_optimizer", "neuronx_distributed_config"]
