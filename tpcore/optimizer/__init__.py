"""NeuronX Distributed's ZeRO-1, by its path. New code finds optimizers in ``tpcore.optim``."""

from ..integrations.nxd.zero1 import NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer"]
