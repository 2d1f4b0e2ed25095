"""The sequence-parallel norm under its NeuronX Distributed path."""

from ... import layers
from .attributes import NormArguments


class LayerNorm(NormArguments, layers.LayerNorm):
    """``tpcore.LayerNorm``; ``sequence_parallel_enabled`` is its ``sequence_parallel``."""


__all__ = ["LayerNorm"]
