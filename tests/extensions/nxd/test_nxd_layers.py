"""Layers and attention as scripts for NeuronX Distributed use them: sums in place, the sequence first, attributes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.worlds import by_call, each_rank
from torch import Tensor, nn

import tpcore
import tpcore_nxd
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_nxd.kernels import nki_flash_attn_func, nki_ring_attn_func
from tpcore_nxd.optimizer import NeuronZero1Optimizer
from tpcore_nxd.overrides import apply_rotary_pos_emb
from tpcore_nxd.parallel_layers import layers, mappings, parallel_state
from tpcore_nxd.utils import get_batch_on_this_context_parallel_rank


# -- reduce_from_tensor_model_parallel_region ---------------------------------------------------------------
@each_rank(dp=1, tp=2)
def test_a_gradient_is_summed_in_place_and_what_is_recorded_is_not_changed(ctx: ParallelContext) -> None:
    mine = float(ctx.coord("tp") + 1)
    grad = torch.full((4,), mine)
    assert mappings.reduce_from_tensor_model_parallel_region(grad) is grad
    assert grad.tolist() == [3.0] * 4
    with torch.no_grad():
        weight = nn.Parameter(torch.full((2, 3), mine))
        mappings.reduce_from_tensor_model_parallel_region(weight.t())
    assert weight.eq(3).all()

    leaf = torch.full((4,), mine, requires_grad=True)
    x = leaf * 1
    y = mappings.reduce_from_tensor_model_parallel_region(x)
    assert y.tolist() == [3.0] * 4
    assert x.tolist() == [mine] * 4
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0] * 4

    one_place = torch.full((1,), mine).expand(4)
    assert mappings.reduce_from_tensor_model_parallel_region(one_place).tolist() == [3.0] * 4
    assert one_place.tolist() == [mine] * 4


# -- ParallelEmbedding --------------------------------------------------------------------------------------
FORMS = [{}, {"sequence_dimension": 0}, {"shard_across_embedding": True}, {"sequence_dimension": -2}]


@pytest.mark.parametrize("options", FORMS, ids=str)
@each_rank(dp=1, tp=2)
def test_the_embedding_of_a_sequence_parallel_model(ctx: ParallelContext, options: dict[str, Any]) -> None:
    """[sequence / tp, batch, hidden], or with dimension 1 [batch, sequence / tp, hidden]."""
    ids = torch.arange(8).view(2, 4)
    torch.manual_seed(0)
    plain = nn.Embedding(10, 6)
    torch.manual_seed(0)
    layer = layers.ParallelEmbedding(10, 6, sequence_parallel_enabled=True, **options)
    assert isinstance(layer, tpcore.ParallelEmbedding)
    y, dim, rank = layer(ids), options.get("sequence_dimension", 0) % 3, ctx.coord("tp")
    whole = plain(ids) if dim == 1 else plain(ids).transpose(0, 1)
    assert torch.equal(y, whole.chunk(2, dim)[rank])
    y.square().sum().backward()
    whole.square().sum().backward()
    spec = layer.shard_specs["weight"]
    assert plain.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, spec.shard(plain.weight.grad, rank, 2))
    torch.manual_seed(0)
    sums = layers.ParallelEmbedding(10, 6, collect_output=False)(ids)
    assert torch.equal(mappings.reduce_from_tensor_model_parallel_region(sums), plain(ids))


# -- what scripts read and call -----------------------------------------------------------------------------
@each_rank(dp=1, tp=2)
def test_attributes_that_scripts_read(ctx: ParallelContext) -> None:
    init = nn.init.ones_
    column = layers.ColumnParallelLinear(
        6, 12, stride=3, init_method=init, dtype=torch.bfloat16, sequence_parallel_enabled=True
    )
    row = layers.RowParallelLinear(12, 6, input_is_parallel=True)
    assert isinstance(column, layers.BaseParallelLinear)
    assert isinstance(row, layers.BaseParallelLinear)
    assert (column.output_size_per_partition, column.input_size_per_partition) == (6, 6)
    assert (row.output_size_per_partition, row.input_size_per_partition) == (6, 6)
    assert (column.stride, row.stride) == (3, 1)
    assert (column.sequence_parallel_enabled, column.sequence_dimension) == (True, 0)
    assert (row.sequence_parallel_enabled, row.sequence_dimension) == (False, None)
    assert (column.dtype, row.dtype) == (torch.bfloat16, torch.float32)
    assert (column.arg_init_method, row.arg_init_method) == (init, None)
    assert column.tensor_parallel_group is tpcore_nxd.parallel_state.get_tensor_model_parallel_group()
    weight, bias = layers.ColumnParallelLinear(4, 8, stride=2).weight, layers.RowParallelLinear(4, 8).bias
    marks = (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride, weight.num_partitions)
    assert marks == (True, 0, 2, 2)
    assert (bias.tensor_model_parallel, bias.partition_dim, bias.num_partitions) == (False, -1, 1)
    table = layers.ParallelEmbedding(10, 6)
    rank = ctx.coord("tp")
    assert (table.num_embeddings_per_partition, table.start_index, table.end_index) == (5, 5 * rank, 5 * rank + 5)


@pytest.mark.parametrize("method", ["init_weight_cpu", "initialize_weight_and_bias", "reset_parameters"])
@each_rank(dp=1, tp=2)
def test_a_module_made_on_meta_is_filled_as_the_constructor_fills_it(ctx: ParallelContext, method: str) -> None:
    for make in (
        partial(layers.ColumnParallelLinear, 6, 12, stride=3),
        partial(layers.RowParallelLinear, 12, 6),
        partial(layers.ParallelEmbedding, 10, 6, 3),
    ):
        torch.manual_seed(0)
        want = make(device="cpu")
        late = make(device="meta").to_empty(device="cpu")
        torch.manual_seed(0)
        getattr(late, method)()
        for a, b in zip(want.parameters(), late.parameters(), strict=True):
            assert torch.equal(a, b)
            assert b.tensor_model_parallel == a.tensor_model_parallel


@each_rank(dp=1, tp=2)
def test_master_weight_is_the_full_initial_weight_and_costs_no_random_numbers(ctx: ParallelContext) -> None:
    torch.manual_seed(5)
    plain, state = nn.Linear(8, 12, dtype=torch.float64), torch.get_rng_state()
    for make in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        torch.manual_seed(5)
        layer = make(8, 12, dtype=torch.float64, keep_master_weight=True)
        assert torch.equal(layer.master_weight, plain.weight)
        assert torch.equal(torch.get_rng_state(), state)
        assert set(layer.state_dict()) == {"weight", "bias"}


@each_rank(dp=1, tp=2)
def test_a_partial_output_is_summed_by_the_caller(ctx: ParallelContext) -> None:
    partial_sum = layers.RowParallelLinear(8, 8, bias=False, input_is_parallel=True, reduce_output=False)
    whole = tpcore.RowParallelLinear(8, 8, bias=False, input_is_parallel=True)
    whole.load_state_dict(partial_sum.state_dict())
    mine = torch.randn(4, 4)
    summed = mappings.reduce_from_tensor_model_parallel_region(partial_sum(mine))
    assert torch.equal(summed, whole(mine))


REFUSED = by_call(r"""
ParallelEmbedding(8, 4, collect_output=False, sequence_parallel_enabled=True)
    collect_output=False leaves the sum to the caller
ColumnParallelLinear(4, 8, sequence_dimension=1)
    sequence_dimension=1 without sequence_parallel_enabled=True
RowParallelLinear(4, 8, reduce_output=False)
    reduce_output=False, bias=True, .* once per rank
""")


@pytest.mark.parametrize("call", REFUSED)
@each_rank(dp=1, tp=2)
def test_refused_with_the_values_and_the_remedy(ctx: ParallelContext, call: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[call]):
        eval(call, vars(layers))


@each_rank(dp=1, tp=2)
def test_a_local_weight_is_that_of_the_layer(ctx: ParallelContext) -> None:
    full = torch.arange(72.0).view(12, 6)
    layer = layers.ColumnParallelLinear(6, 12, False, stride=3, init_method=lambda t: t.copy_(full))
    assert torch.equal(layers.create_local_weight(full, 0, 6, 3), layer.weight)
    out = torch.empty(12, 3)
    assert layers.create_local_weight(full, 1, 3, 1, out) is out
    assert torch.equal(out, full.chunk(2, 1)[ctx.coord("tp")])
    with pytest.raises(ValueError, match="2 shards of 5 are not dim 0"):
        layers.create_local_weight(full, 0, 5, 1)


# -- attention and rotary positions, in both layouts of their inputs -------------------------------------------
B, H, KV, S, D = 2, 4, 2, 6, 8


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, h, S, D, generator=drawn, dtype=torch.float64) for h in (H, KV, KV))
    return q, k, v


@pytest.mark.parametrize("transposed", [False, True])
def test_attention_is_the_one_written_out(transposed: bool) -> None:
    """Causal, in plain operations; each head of k and v serves two of q."""
    given = [t.requires_grad_() for t in inputs()]
    turned = [t.transpose(-1, -2) if transposed else t for t in given]
    got = nki_flash_attn_func(*turned, softmax_scale=0.3, transpose_nki_inputs=transposed)
    q, k, v = given[0], *(t.repeat_interleave(H // KV, 1) for t in given[1:])
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))
    want = scores.softmax(-1) @ v
    torch.testing.assert_close(got, want)
    mine, theirs = (torch.autograd.grad(y.square().sum(), given) for y in (got, want))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("cp", "causal"), [(1, True), (3, True), (3, False)])
def test_a_ring_of_ranks_with_a_chunk_of_the_tokens_each(cp: int, causal: bool) -> None:
    whole = [t.requires_grad_() for t in inputs()]
    want = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    grads = torch.autograd.grad(want.square().sum(), whole)

    def check(ctx: ParallelContext) -> None:
        pairs, at = parallel_state.get_context_model_parallel_src_tgt_pairs(), ctx.coord("cp")
        mine = [t.detach().chunk(cp, 2)[at].requires_grad_() for t in whole]
        got = nki_ring_attn_func(*mine, ctx.rank, pairs, causal=causal)
        torch.testing.assert_close(got, want.chunk(cp, 2)[at])
        for found, full in zip(torch.autograd.grad(got.square().sum(), mine), grads, strict=True):
            torch.testing.assert_close(found, full.chunk(cp, 2)[at])
        with pytest.raises(ValueError, match=r"pairs=\[\[0, 9\]\]\): the ring of this mesh is \[\[0, \d"):
            nki_ring_attn_func(*mine, ctx.rank, [[0, 9]])
        if cp > 1:
            with pytest.raises(ValueError, match=r"dropout_p=0.1\) over cp=3"):
                nki_ring_attn_func(*mine, ctx.rank, pairs, dropout_p=0.1)

    run_ranks(Mesh({"cp": cp, "tp": 2}), check)


@each_rank(dp=2, cp=2, tp=1)
def test_names_of_the_axis_cp(ctx: ParallelContext) -> None:
    batch = {"input_ids": torch.arange(8).reshape(1, 8), "labels": torch.arange(8).reshape(1, 8)}
    mine, at = get_batch_on_this_context_parallel_rank(batch), ctx.coord("cp")
    assert mine["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]][at : at + 1]
    assert mine["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, -100]][at : at + 1]
    assert parallel_state.get_rank_info_str() == f"DP_{ctx.coord('dp')}_TP_0_PP_0_CP_{at}"
    groups = parallel_state.get_zero1_sharding_groups()
    assert groups == [[0, 1, 2, 3]]
    weight = torch.nn.Parameter(torch.ones(4))
    NeuronZero1Optimizer([weight], torch.optim.SGD, lr=1, sharding_groups=groups)
    with pytest.raises(ValueError, match="state is sharded over dp, ep and cp"):
        NeuronZero1Optimizer([weight], torch.optim.SGD, lr=1, sharding_groups=[[0, 2], [1, 3]])


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
