"""Attention, by its NeuronX Distributed path."""

from ..integrations.nxd.attention import nki_flash_attn_func

__all__ = ["nki_flash_attn_func"]
