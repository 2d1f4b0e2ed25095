"""Helpers of NeuronX Distributed's scripts, by their path."""

from .environment import cpu_mode, get_device, mark_step, master_print

__all__ = ["cpu_mode", "get_device", "mark_step", "master_print"]
