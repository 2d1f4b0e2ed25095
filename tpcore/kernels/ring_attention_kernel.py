"""Attention over a ring of ranks, by its NeuronX Distributed path."""

from ..integrations.nxd.attention import nki_ring_attn_func

__all__ = ["nki_ring_attn_func"]
