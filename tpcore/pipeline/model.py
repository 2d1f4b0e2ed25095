"""The pipeline engine by its full path."""

from ..integrations.nxd.pipeline import NxDPPModel

__all__ = ["NxDPPModel"]
