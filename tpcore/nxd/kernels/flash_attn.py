"""Attention by the name of NeuronX Distributed's kernel, in operations of torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...runtime import random


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
    result. k and v may have fewer heads, of which each serves several of q. ``dropout_p``: each tp rank, whose heads
    are its own, draws its own numbers, from ``tpcore.random``; a ``seed`` is a ValueError. ``lnc``, ``hardware_type``
    and ``mixed_precision`` choose among kernels of one device, and there is one way here, for any number of tokens.
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
