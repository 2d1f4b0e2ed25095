"""NeuronX Distributed's ZeRO-1, by its path. New code uses ``tpcore.Zero1``."""

from .zero_redundancy_optimizer import NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer"]
