"""Attention and rotary positions by the names of NeuronX Distributed's kernels, in operations of torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import random


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

    ``transpose_nki_inputs``: q, k and v are ``[batch, heads, head size, tokens]``, else they have the shape
    of the result. k and v may have fewer heads, of which each serves several of q. ``dropout_p``: each tp
    rank, whose heads are its own, draws its own numbers, from ``tpcore.random``; a ``seed`` is a ValueError.
    ``lnc``, ``hardware_type`` and ``mixed_precision`` choose among kernels of one device, and there is one
    way here, for any number of tokens.
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
    """The attention of a ring of one rank, which has all tokens: ``[batch, heads, tokens, head size]``.

    ``src_tgt_pairs``: those of ``parallel_state.get_context_model_parallel_src_tgt_pairs``. ValueError where
    a rank sends to another, for there is no context parallelism. The rest is as in ``nki_flash_attn_func``.
    """
    if others := [list(pair) for pair in src_tgt_pairs if pair[0] != pair[1]]:
        raise ValueError(
            f"nki_ring_attn_func(src_tgt_pairs): {others[0]} sends keys to another rank, and there is no "
            "context parallelism: leave context_parallel_size at 1"
        )
    return nki_flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        seed=seed,
        transpose_nki_inputs=False,
    )


def apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    flash_attn: bool,
    transpose_nki_inputs: bool = True,
) -> tuple[Tensor, Tensor]:
    """q and k, turned by their positions (Su et al. 2021, arXiv:2104.09864), halves paired as Llama does it.

    ``cos`` and ``sin``: ``[batch, tokens, head size]``, or tables by position with ``position_ids``. q and k:
    ``[batch, heads, tokens, head size]``, or with ``flash_attn`` and ``transpose_nki_inputs`` the layout that
    ``nki_flash_attn_func`` takes.
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin, dim = cos.unsqueeze(1), sin.unsqueeze(1), -1
    if flash_attn and transpose_nki_inputs:
        cos, sin, dim = cos.transpose(-1, -2), sin.transpose(-1, -2), -2

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim)
        return x * cos + torch.cat((-second, first), dim) * sin

    return turned(q), turned(k)
