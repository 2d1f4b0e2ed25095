"""Norms, clipping and sums of gradients under their NeuronX Distributed path."""

from ..integrations.nxd.grads import (
    allreduce_sequence_parallel_gradients,
    bucket_allreduce_gradients,
    clip_grad_norm,
    clip_grads_with_norm,
    get_grad_norm,
)

__all__ = [
    "allreduce_sequence_parallel_gradients",
    "bucket_allreduce_gradients",
    "clip_grad_norm",
    "clip_grads_with_norm",
    "get_grad_norm",
]
