"""Losses over a cut vocabulary under their NeuronX Distributed path."""

from ..integrations.nxd.logprobs import from_parallel_logits_to_logprobs
from ..layers.loss import parallel_cross_entropy

__all__ = ["from_parallel_logits_to_logprobs", "parallel_cross_entropy"]
