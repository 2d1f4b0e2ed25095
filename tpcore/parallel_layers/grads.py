"""Gradient clipping under its NeuronX Distributed path."""

from ..train.clip import clip_grad_norm

__all__ = ["clip_grad_norm"]
