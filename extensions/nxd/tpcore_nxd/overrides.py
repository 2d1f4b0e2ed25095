"""What NeuronX Distributed has instead of a function of transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from .paths import mirror


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


mirror(__name__, "overrides.transformer_overrides")
