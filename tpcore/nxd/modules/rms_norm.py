"""The norm, by its NeuronX Distributed path."""

from ...layers import RMSNorm

__all__ = ["RMSNorm"]
