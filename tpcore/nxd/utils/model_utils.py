"""Functions on whole models, by their NeuronX Distributed path."""

from ...layers.module import move_model_to_device

__all__ = ["move_model_to_device"]
