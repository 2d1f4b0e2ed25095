"""Attention and rotary positions by their NeuronX Distributed names, in both layouts of their inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpcore.layout.mesh import Mesh
from tpcore.nxd.kernels.flash_attn import nki_flash_attn_func
from tpcore.nxd.kernels.ring_attention_kernel import nki_ring_attn_func
from tpcore.nxd.optimizer.zero_redundancy_optimizer import NeuronZero1Optimizer
from tpcore.nxd.overrides.transformer_overrides import apply_rotary_pos_emb
from tpcore.nxd.parallel_layers import parallel_state
from tpcore.nxd.utils.batch_utils import get_batch_on_this_context_parallel_rank
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
        torch.autograd.grad(got.square().sum(), given), torch.autograd.grad(want.square().sum(), given), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_ring_of_one_rank_attends_to_all() -> None:
    def check(ctx: ParallelContext) -> None:
        pairs = parallel_state.get_context_model_parallel_src_tgt_pairs()
        got = nki_ring_attn_func(*inputs(), ctx.rank, pairs)
        torch.testing.assert_close(got, written_out(*inputs(), D**-0.5))
        with pytest.raises(ValueError, match=r"pairs=\[\[0, 1\], \[1, 0\]\]\): the ring of this mesh is \[\[0, 0\]"):
            nki_ring_attn_func(*inputs(), ctx.rank, [[0, 1], [1, 0]])

    run_ranks(Mesh({"tp": 2}), check)


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_of_ranks_with_a_chunk_of_the_tokens_each(causal: bool) -> None:
    whole = [t.requires_grad_() for t in inputs()]
    want = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    grads = torch.autograd.grad(want.square().sum(), whole)

    def check(ctx: ParallelContext) -> None:
        pairs, at = parallel_state.get_context_model_parallel_src_tgt_pairs(), ctx.coord("cp")
        mine = [t.detach().chunk(3, 2)[at].requires_grad_() for t in whole]
        got = nki_ring_attn_func(*mine, ctx.rank, pairs, causal=causal)
        torch.testing.assert_close(got, want.chunk(3, 2)[at])
        for found, full in zip(torch.autograd.grad(got.square().sum(), mine), grads, strict=True):
            torch.testing.assert_close(found, full.chunk(3, 2)[at])
        with pytest.raises(ValueError, match=r"dropout_p=0.1\) over cp=3"):
            nki_ring_attn_func(*mine, ctx.rank, pairs, dropout_p=0.1)
        with pytest.raises(ValueError, match="the ring of this mesh is"):
            nki_ring_attn_func(*mine, ctx.rank, pairs[::-1][:-1])

    run_ranks(Mesh({"cp": 3, "tp": 2}), check)


def test_names_of_the_axis_cp() -> None:
    batch = {"input_ids": torch.arange(8).reshape(1, 8), "labels": torch.arange(8).reshape(1, 8)}

    def check(ctx: ParallelContext) -> None:
        mine, at = get_batch_on_this_context_parallel_rank(batch), ctx.coord("cp")
        assert mine["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]][at : at + 1]
        assert mine["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, -100]][at : at + 1]
        assert parallel_state.get_rank_info_str() == f"DP_{ctx.coord('dp')}_TP_0_PP_0_CP_{at}"
        groups = parallel_state.get_zero1_sharding_groups()
        assert groups == [[0, 1, 2, 3]]
        weight = torch.nn.Parameter(torch.ones(4))
        NeuronZero1Optimizer([weight], torch.optim.SGD, lr=1, sharding_groups=groups)
        with pytest.raises(ValueError, match="state is cut over dp, ep and cp"):
            NeuronZero1Optimizer([weight], torch.optim.SGD, lr=1, sharding_groups=[[0, 2], [1, 3]])

    run_ranks(Mesh({"dp": 2, "cp": 2, "tp": 1}), check)


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
