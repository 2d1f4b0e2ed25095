"""Attention over a ring of ranks, by its NeuronX Distributed path."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...layers.context_parallel import attention
from ...layers.tokens import TokenOrder, Visible
from ...runtime.context import current
from ..parallel_layers.parallel_state import get_context_model_parallel_src_tgt_pairs
from .flash_attn import nki_flash_attn_func


def nki_ring_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_id: int,
    src_tgt_pairs: Sequence[Sequence[int]],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Attention over the ranks of cp, each of which has a contiguous chunk of the tokens: ``[batch, heads, tokens of
    this rank, head size]``.

    ``src_tgt_pairs``: those of ``parallel_state.get_context_model_parallel_src_tgt_pairs``; ValueError for others,
    and for dropout where cp is above 1. ``rank_id`` is not used: the position is data. The rest is as in
    ``nki_flash_attn_func``.
    """
    ring = get_context_model_parallel_src_tgt_pairs()
    if sorted(map(list, src_tgt_pairs)) != ring:
        raise ValueError(
            f"nki_ring_attn_func(src_tgt_pairs={[list(pair) for pair in src_tgt_pairs]}): the ring of this mesh is "
            f"{ring}; pass parallel_state.get_context_model_parallel_src_tgt_pairs()"
        )
    comm = current().over_axis("cp")
    if comm is not None:
        if dropout_p:
            raise ValueError(
                f"nki_ring_attn_func(dropout_p={dropout_p}) over cp={comm.size}: ranks would draw other numbers for "
                "attention weights than one process; set it to 0"
            )
        return attention("ring", q, k, v, Visible(causal), TokenOrder(comm), softmax_scale)
    return nki_flash_attn_func(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, seed=seed, transpose_nki_inputs=False
    )
