"""The pipeline engine of NeuronX Distributed, by its path. New code uses ``tpcore.PipelineModel``."""

from .model import NxDPPModel

__all__ = ["NxDPPModel"]
