"""Configuration, model and optimizer by their full path."""

from .config import neuronx_distributed_config
from .model import initialize_parallel_model
from .optimizer import initialize_parallel_optimizer

__all__ = ["initialize_parallel_model", "initialize_parallel_optimizer", "neuronx_distributed_config"]
