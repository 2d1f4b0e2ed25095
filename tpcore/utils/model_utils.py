"""What scripts do to whole models, by its NeuronX Distributed path."""

from ..layers.module import move_model_to_device

__all__ = ["move_model_to_device"]
