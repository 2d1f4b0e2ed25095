"""The trainer's optimizer by its full path."""

from ..integrations.nxd.optimizer import NxDOptimizer

__all__ = ["NxDOptimizer"]
