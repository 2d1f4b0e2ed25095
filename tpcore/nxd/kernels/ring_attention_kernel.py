"""Attention over a ring of ranks, by its NeuronX Distributed path."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
