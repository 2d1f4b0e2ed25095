"""Batches over context parallelism, by their NeuronX Distributed path."""

from .environment import get_batch_on_this_context_parallel_rank

__all__ = ["get_batch_on_this_context_parallel_rank"]
