"""Layers as scripts for NeuronX Distributed use them: reductions in place, the sequence first, attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.nxd.parallel_layers import layers, mappings
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

MESH = Mesh({"dp": 1, "tp": 2})


# -- reduce_from_tensor_model_parallel_region ---------------------------------------------------------------
def test_a_gradient_is_summed_in_place_and_what_is_recorded_is_not_changed() -> None:
    def check(ctx: ParallelContext) -> None:
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

    run_ranks(MESH, check)


# -- ParallelEmbedding --------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"sequence_dimension": 0}, {"shard_across_embedding": True}])
def test_the_embedding_of_a_sequence_parallel_model_puts_the_sequence_first(options: dict[str, Any]) -> None:
    def check(ctx: ParallelContext) -> None:
        ids = torch.arange(8).view(2, 4)
        torch.manual_seed(0)
        plain = nn.Embedding(10, 6)
        torch.manual_seed(0)
        layer = layers.ParallelEmbedding(10, 6, sequence_parallel_enabled=True, **options)
        assert isinstance(layer, tpcore.ParallelEmbedding)
        y = layer(ids)
        rank = ctx.coord("tp")
        whole = plain(ids).transpose(0, 1)
        assert torch.equal(y, whole[2 * rank : 2 * rank + 2])  # [sequence / tp, batch, hidden]
        y.square().sum().backward()
        whole.square().sum().backward()
        spec = layer.shard_specs["weight"]
        assert plain.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad, spec.shard(plain.weight.grad, rank, 2))

    run_ranks(MESH, check)


def test_the_other_forms_of_the_embedding() -> None:
    def check(ctx: ParallelContext) -> None:
        ids = torch.arange(8).view(2, 4)
        torch.manual_seed(0)
        whole = layers.ParallelEmbedding(10, 6)(ids)
        torch.manual_seed(0)
        second = layers.ParallelEmbedding(10, 6, sequence_parallel_enabled=True, sequence_dimension=1)(ids)
        rank = ctx.coord("tp")
        assert torch.equal(second, whole[:, 2 * rank : 2 * rank + 2])
        torch.manual_seed(0)
        partial = layers.ParallelEmbedding(10, 6, collect_output=False)(ids)
        assert torch.equal(mappings.reduce_from_tensor_model_parallel_region(partial), whole)

    run_ranks(MESH, check)


# -- what scripts read and call -----------------------------------------------------------------------------
def test_attributes_that_scripts_read() -> None:
    def check(ctx: ParallelContext) -> None:
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
        assert column.tensor_parallel_group is tpcore.nxd.parallel_state.get_tensor_model_parallel_group()
        table = layers.ParallelEmbedding(10, 6)
        rank = ctx.coord("tp")
        assert (table.num_embeddings_per_partition, table.start_index, table.end_index) == (5, 5 * rank, 5 * rank + 5)

    run_ranks(MESH, check)


@pytest.mark.parametrize("method", ["init_weight_cpu", "initialize_weight_and_bias", "reset_parameters"])
def test_a_module_made_on_meta_is_filled_as_the_constructor_fills_it(method: str) -> None:
    makes = (
        lambda device: layers.ColumnParallelLinear(6, 12, stride=3, device=device),
        lambda device: layers.RowParallelLinear(12, 6, device=device),
        lambda device: layers.ParallelEmbedding(10, 6, 3, device=device),
    )

    def check(ctx: ParallelContext) -> None:
        for make in makes:
            torch.manual_seed(0)
            want = make("cpu")
            late = make("meta").to_empty(device="cpu")
            torch.manual_seed(0)
            getattr(late, method)()
            for a, b in zip(want.parameters(), late.parameters(), strict=True):
                assert torch.equal(a, b)
                assert b.tensor_model_parallel == a.tensor_model_parallel

    run_ranks(MESH, check)


def test_a_local_weight_is_that_of_the_layer() -> None:
    def check(ctx: ParallelContext) -> None:
        full = torch.arange(72.0).view(12, 6)
        layer = layers.ColumnParallelLinear(6, 12, False, stride=3, init_method=lambda t: t.copy_(full))
        assert torch.equal(layers.create_local_weight(full, 0, 6, 3), layer.weight)
        out = torch.empty(12, 3)
        assert layers.create_local_weight(full, 1, 3, 1, out) is out
        assert torch.equal(out, full.chunk(2, 1)[ctx.coord("tp")])
        with pytest.raises(ValueError, match="2 shards of 5 are not dim 0"):
            layers.create_local_weight(full, 0, 5, 1)

    run_ranks(MESH, check)
