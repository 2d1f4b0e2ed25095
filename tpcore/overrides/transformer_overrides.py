"""Rotary positions, by their NeuronX Distributed path."""

from ..integrations.nxd.attention import apply_rotary_pos_emb

__all__ = ["apply_rotary_pos_emb"]
