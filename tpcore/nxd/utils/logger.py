"""Loggers, by their NeuronX Distributed path."""

from .environment import get_logger

__all__ = ["get_logger"]
