"""Initial values by a function for whole modules: each rank gets its part of what the function does to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.worlds import each_rank
from torch import nn

import tpcore


def fill(module: nn.Module) -> None:
    """By the kind of module and by the sizes of the whole."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=1 / module.in_features)
        module.bias.data.uniform_(-0.1, 0.1)
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_()
        module.weight.data[7] = 0.0


def made(embedding: Any, column: Any, row: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(embedding(12, 8), column(8, 12), nn.LayerNorm(12), row(12, 8))


@pytest.mark.parametrize("tp", [1, 2, 4])
@each_rank(tp="tp")
def test_values_are_those_of_apply_and_hooks_stay(ctx: tpcore.ParallelContext, tp: int) -> None:
    whole = made(nn.Embedding, nn.Linear, nn.Linear)
    mine: Any = made(tpcore.ParallelEmbedding, tpcore.ColumnParallelLinear, tpcore.RowParallelLinear)
    seen = list[tuple[int, ...]]()
    mine[1].register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    torch.manual_seed(2)
    whole.apply(fill)
    after = torch.rand(3)
    torch.manual_seed(2)
    assert tpcore.init_weights(mine, fill) is mine
    assert torch.equal(torch.rand(3), after)
    for name, p in mine.named_parameters():
        layer, _, key = name.rpartition(".")
        part_of = getattr(mine.get_submodule(layer), "part_of", lambda key, p: p)
        assert torch.equal(p, part_of(key, whole.get_parameter(name))), name
    mine[1](torch.ones(1, 8))
    assert seen == [(1, 12)]


@each_rank(pp=2, tp=2)
def test_a_model_on_stages_is_refused(ctx: tpcore.ParallelContext) -> None:
    layers = [tpcore.ColumnParallelLinear(8, 8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"on one of pp=2 stages.*call model.apply\(fn\) on the whole"):
        tpcore.init_weights(tpcore.PipelinedLayers(layers, 2), fill)
