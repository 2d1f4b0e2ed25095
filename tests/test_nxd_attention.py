"""Attention and rotary positions by their NeuronX Distributed names, in both layouts of their inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpcore.layout.mesh import Mesh
from tpcore.nxd.kernels.flash_attn import nki_flash_attn_func
from tpcore.nxd.kernels.ring_attention_kernel import nki_ring_attn_func
from tpcore.nxd.overrides.transformer_overrides import apply_rotary_pos_emb
from tpcore.nxd.parallel_layers import parallel_state
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

B, H, KV, S, D = 2, 4, 2, 6, 8


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, h, S, D, generator=drawn, dtype=torch.float64) for h in (H, KV, KV))
    return q, k, v


def written_out(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention in plain operations; each head of k and v serves two of q."""
    k, v = (t.repeat_interleave(H // KV, 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("transposed", [False, True])
def test_attention_is_the_one_written_out(transposed: bool) -> None:
    given = [t.requires_grad_() for t in inputs()]
    turned = [t.transpose(-1, -2) if transposed else t for t in given]
    got = nki_flash_attn_func(*turned, softmax_scale=0.3, transpose_nki_inputs=transposed)
    want = written_out(*given, 0.3)
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(
        torch.autograd.grad(got.square().sum(), given),
        torch.autograd.grad(want.square().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_ring_of_one_rank_attends_to_all() -> None:
    def check(ctx: ParallelContext) -> None:
        pairs = parallel_state.get_context_model_parallel_src_tgt_pairs()
        got = nki_ring_attn_func(*inputs(), ctx.rank, pairs)
        torch.testing.assert_close(got, written_out(*inputs(), D**-0.5))
        with pytest.raises(ValueError, match=r"\[0, 1\] sends keys to another rank"):
            nki_ring_attn_func(*inputs(), ctx.rank, [[0, 1], [1, 0]])

    run_ranks(Mesh({"tp": 2}), check)


def test_dropout_is_drawn_by_each_tp_rank_for_its_own_heads() -> None:
    def check(ctx: ParallelContext) -> Tensor:
        torch.manual_seed(0)
        return nki_flash_attn_func(*inputs(), dropout_p=0.5, transpose_nki_inputs=False)

    first, second = run_ranks(Mesh({"tp": 2}), check)
    again, _ = run_ranks(Mesh({"tp": 2}), check)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match=r"tpcore\.random"):
        nki_flash_attn_func(*inputs(), dropout_p=0.5, seed=torch.ones(1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tables", [False, True])
def test_rotary_positions_are_those_of_transformers(transposed: bool, tables: bool) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k, _ = inputs()
    places = torch.arange(S).flip(0).expand(B, S)
    angles = torch.arange(S, dtype=torch.float64)[:, None] / 10.0 ** torch.arange(D // 2).repeat(2)
    want = llama.apply_rotary_pos_emb(q, k, angles.cos()[places], angles.sin()[places])
    cos, sin = (t if tables else t[places] for t in (angles.cos(), angles.sin()))
    given = [t.transpose(-1, -2) if transposed else t for t in (q, k)]
    got = apply_rotary_pos_emb(*given, cos, sin, places if tables else None, transposed)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.transpose(-1, -2) if transposed else mine, theirs)
