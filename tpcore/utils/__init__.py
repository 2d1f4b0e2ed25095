"""Helpers of NeuronX Distributed's scripts, by their path."""

from ..integrations.nxd.environment import cpu_mode, get_device, mark_step, master_print

__all__ = ["cpu_mode", "get_device", "mark_step", "master_print"]
