"""NeuronX Distributed's ZeRO-1 by its full path."""

from ..integrations.nxd.zero1 import NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer"]
