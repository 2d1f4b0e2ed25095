"""The trainer's model by its full path."""

from ..integrations.nxd.model import NxDModel

__all__ = ["NxDModel"]
