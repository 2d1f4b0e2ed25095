"""Saving and loading under their NeuronX Distributed path."""

from ...checkpoint import load, save

__all__ = ["load", "save"]
