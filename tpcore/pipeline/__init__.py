"""The pipeline engine of NeuronX Distributed, by its path. New code uses ``tpcore.PipelineModel``."""

from ..integrations.nxd.pipeline import NxDPPModel

__all__ = ["NxDPPModel"]
