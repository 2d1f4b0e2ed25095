"""A checkpoint of one layout in a model of another: optimizer state follows the model's parameters."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tpcore
from tpcore import Block, Mesh, ParallelContext, ParallelModule, ShardSpec
from tpcore.checkpoint import load, save
from tpcore.errors import CheckpointError
from tpcore.layers.sharding import sharding
from tpcore.layout.layout import Slot
from tpcore.testing import run_ranks


class Heads(ParallelModule):
    """A weight of 16 x 3 whose blocks are cut as told."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        spec = ShardSpec((16, 3), 0, blocks)
        self.shard_parameter("weight", spec, nn.init.normal_, torch.float32, None)


LAYOUTS = {
    "whole": (Block(16),),
    "strided": (Block(8), Block(8)),
    "heads": (Block(8, 2), Block(4, 2, replicate=True), Block(4, 2, replicate=True)),
}


def trained(model: Heads, ctx: ParallelContext, *, names: bool = True) -> torch.optim.Optimizer:
    """AdamW after two steps, by gradients that are functions of the place in the full tensor."""
    spec, n = model.shard_specs["weight"], ctx.comm("tp").size
    full = torch.arange(48.0).reshape(16, 3)
    with torch.no_grad():
        model.weight.copy_(spec.shard(full, ctx.coord("tp"), n))
    optimizer = torch.optim.AdamW(model.named_parameters() if names else model.parameters(), lr=0.1)
    for step in (1, 2):
        model.weight.grad = spec.shard(full * step - 7, ctx.coord("tp"), n)
        optimizer.step()
    return optimizer


def _saved(path: Path, tp: int, blocks: str, *, names: bool = True) -> None:
    def rank(ctx: ParallelContext) -> None:
        model = Heads(*LAYOUTS[blocks])
        optimizer = trained(model, ctx, names=names)
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    run_ranks(Mesh({"dp": 1, "tp": tp}), rank)


def _same_state(got: dict[str, Any], want: torch.optim.Optimizer) -> None:
    for key, value in want.state_dict()["state"][0].items():
        assert torch.equal(got["state"][0][key], value), key


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize(("here", "tp"), [("whole", 2), ("strided", 4), ("heads", 2), ("heads", 4)])
def test_optimizer_state_is_cut_by_the_models_layout(tmp_path: Path, here: str, there: str, tp: int) -> None:
    """At the same degree: the weights came out right before as well, the moments did not."""
    _saved(tmp_path / "c", 4, there)

    def rank(ctx: ParallelContext) -> None:
        want = Heads(*LAYOUTS[here])
        want_optimizer = trained(want, ctx)
        model = Heads(*LAYOUTS[here])
        rest = load(tmp_path / "c", model)
        assert torch.equal(model.weight, want.weight)
        _same_state(rest["optimizer"], want_optimizer)
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        load(tmp_path / "c", optimizer, model_key="optimizer")
        _same_state(optimizer.state_dict(), want_optimizer)
        for parameter, stepped in ((model, optimizer), (want, want_optimizer)):
            parameter.weight.grad = torch.ones_like(parameter.weight)
            stepped.step()
        assert torch.equal(model.weight, want.weight)

    run_ranks(Mesh({"dp": 1, "tp": tp}), rank)


def test_state_without_names_is_refused_where_the_layouts_differ(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="without the names of its parameters"):
        _saved(tmp_path / "c", 2, "whole", names=False)

    def rank(ctx: ParallelContext) -> None:
        same = Heads(*LAYOUTS["whole"])
        _same_state(load(tmp_path / "c", same)["optimizer"], trained(Heads(*LAYOUTS["whole"]), ctx))
        other = Heads(*LAYOUTS["strided"])
        with pytest.raises(CheckpointError, match=r"made from model\.named_parameters\(\)(.|\n)*strict=False"):
            load(tmp_path / "c", other)
        with pytest.warns(UserWarning, match="left out") if ctx.rank == 0 else nullcontext():
            assert "optimizer" not in load(tmp_path / "c", other, strict=False)

    run_ranks(Mesh({"dp": 1, "tp": 2}), rank)


class Staged(nn.Module):
    """A table over stages and tp, a layer for each place of four on its stage, a norm that all ranks hold."""

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        pp, both = ctx.mesh.axes["pp"], ctx.comm("pp", "tp")
        self.table = tpcore.ParallelEmbedding(10, 4, pad=True, group=both)
        self.layers = nn.ModuleDict()
        for i in range(4):
            slot, layer = Slot("pp", i, 4), tpcore.ColumnParallelLinear(4, 8)
            if slot.coordinate(ctx.mesh) == ctx.coord("pp"):
                layer.place(slot)
                self.layers[str(i)] = layer
        self.norm = nn.LayerNorm(4)
        assert len(self.layers) == 4 // pp


def filled(ctx: ParallelContext) -> Staged:
    """Values that are functions of the name and of the place in the full tensor."""
    model = Staged(ctx)
    with torch.no_grad():
        for name, p in model.named_parameters():
            mark = sharding(p)
            shape = mark.layout.shape if mark else tuple(p.shape)
            full = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape) + 100 * sum(map(ord, name))
            p.copy_(mark.layout.shard(full, ctx.rank, ctx.mesh) if mark else full)
    return model
