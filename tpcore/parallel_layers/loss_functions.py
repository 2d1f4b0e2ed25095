"""The vocabulary-parallel loss under its NeuronX Distributed path."""

from ..layers.loss import parallel_cross_entropy

__all__ = ["parallel_cross_entropy"]
