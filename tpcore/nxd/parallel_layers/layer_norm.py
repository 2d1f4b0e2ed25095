"""The sequence-parallel norm under its NeuronX Distributed path."""

from ...layers import LayerNorm

__all__ = ["LayerNorm"]
