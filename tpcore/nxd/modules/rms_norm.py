"""The norm, by its NeuronX Distributed path."""

from ... import layers
from ..parallel_layers.attributes import NormArguments


class RMSNorm(NormArguments, layers.RMSNorm):
    """``tpcore.RMSNorm``; ``sequence_parallel_enabled`` is its ``sequence_parallel``."""


__all__ = ["RMSNorm"]
