"""Gradient clipping under its NeuronX Distributed path."""

from ..grads import clip_grad_norm

__all__ = ["clip_grad_norm"]
