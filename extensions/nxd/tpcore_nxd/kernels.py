"""Attention by the names of NeuronX Distributed's kernels, in operations of torch. New code calls torch's attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tpcore.layers.context_parallel import attention
from tpcore.layers.tokens import TokenOrder, Visible
from tpcore.runtime import random
from tpcore.runtime.context import current

from .parallel_layers.parallel_state import get_context_model_parallel_src_tgt_pairs
from .paths import mirror


def nki_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lnc: int = 1,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Tensor | None = None,
    hardware_type: Any = None,
    transpose_nki_inputs: bool = True,
) -> Tensor:
    """``F.scaled_dot_product_attention``: ``[batch, heads, tokens, head size]``.

    ``transpose_nki_inputs``: q, k and v are ``[batch, heads, head size, tokens]``, else they have the shape of the
    result. k and v may have fewer heads, of which each serves several of q. ``dropout_p``: each tp rank draws its own
    numbers, from ``tpcore.random``; a ``seed`` is a ValueError. ``lnc``, ``hardware_type`` and ``mixed_precision``
    choose among kernels of one device: they change nothing.
    """
    if seed is not None:
        raise ValueError(
            "nki_flash_attn_func(seed=): dropout draws from tpcore.random, so that a checkpoint of its state "
            "is one of these draws too; leave it out"
        )
    if transpose_nki_inputs:
        q, k, v = (t.transpose(-1, -2) for t in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    with random.sharded() if dropout_p else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=grouped
        )


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
    if comm is None:
        return nki_flash_attn_func(q, k, v, 1, dropout_p, softmax_scale, causal, seed=seed, transpose_nki_inputs=False)
    if dropout_p:
        raise ValueError(
            f"nki_ring_attn_func(dropout_p={dropout_p}) over cp={comm.size}: ranks would draw other numbers for "
            "attention weights than one process; set it to 0"
        )
    return attention("ring", q, k, v, Visible(causal), TokenOrder(comm), softmax_scale)


mirror(__name__, "kernels.flash_attn", "kernels.ring_attention_kernel")
