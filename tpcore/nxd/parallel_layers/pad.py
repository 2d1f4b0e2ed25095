"""Heads that fill the last rank, under their NeuronX Distributed path."""

from .utils import get_padding_length


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add to ``n_head`` so that ``tp_degree`` divides them."""
    return get_padding_length(n_head, tp_degree)


__all__ = ["get_number_of_extra_heads"]
