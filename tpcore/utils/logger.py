"""Loggers, by their NeuronX Distributed path."""

from ..integrations.nxd.environment import get_logger

__all__ = ["get_logger"]
