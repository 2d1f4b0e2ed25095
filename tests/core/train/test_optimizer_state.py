"""An optimizer's saved state goes to its parameters by name, follows their layouts, and fits its own kind alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.nets import Heads
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore import Block, Mesh, ParallelContext, Zero1
from tpcore.checkpoint import load, save
from tpcore.errors import CheckpointError
from tpcore.layers.sharding import sharding
from tpcore.layout.layout import Slot
from tpcore.testing import run_ranks
from tpcore.train.parameters import name_parameters

AdamW = torch.optim.AdamW
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda model: AdamW(model.named_parameters()),
    "AdamW without names": lambda model: AdamW(model.parameters()),
    "Zero1": lambda model: Zero1(AdamW, model.named_parameters()),
}


class Three(nn.Module):
    """Its gradients differ by layer: those of ``q`` are 1, of ``k`` 2, of ``v`` 3."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, tpcore.ColumnParallelLinear(8, 8, bias=False))

    def backward(self) -> None:
        for size, name in enumerate("qkv", 1):
            self.get_submodule(name)(torch.full((1, 8), float(size))).sum().backward()


def averages(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    found = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    return {name.partition(".")[0]: round(float(t.mean()), 6) for name, t in found.items()}


def saved(ctx: ParallelContext, path: Path, make: Make) -> dict[str, float]:
    model = Three("qkv")
    optimizer = make(model)
    model.backward()
    tpcore.optimizer_step(optimizer)
    save({"model": model.state_dict(), "optimizer": optimizer}, path)
    return averages(model, optimizer)


@pytest.mark.parametrize(
    ("make", "how", "tp"),
    [
        ("AdamW without names", "with the model", 1),
        ("AdamW", "with the model", 2),
        ("AdamW", "alone", 1),
        ("Zero1", "with the model", 1),
        ("Zero1", "alone", 2),
        ("Zero1", "load_state_dict", 1),  # torch's own goes by the order of the parameters
    ],
)
def test_state_goes_by_name(tmp_path: Path, make: str, how: str, tp: int) -> None:
    """Into a model whose layers are in another order; on the mesh of the save and on another."""
    want = run_ranks(Mesh({"dp": 2 // tp, "tp": tp}), lambda ctx: saved(ctx, tmp_path / "c", OPTIMIZERS[make]))

    def check(ctx: ParallelContext) -> None:
        model = Three("vqk")
        optimizer = OPTIMIZERS[make](model)
        if how == "with the model":
            load(tmp_path / "c", model, optimizer=optimizer)
        elif how == "alone":
            load(tmp_path / "c", optimizer, model_key="optimizer")
        else:
            optimizer.load_state_dict(load(tmp_path / "c", model)["optimizer"])
        assert averages(model, optimizer) == want[0]
        model.backward()
        tpcore.optimizer_step(optimizer)

    run_ranks(Mesh({"dp": 1, "tp": 2}), check)


@pytest.mark.parametrize("make", ["AdamW", "Zero1"])
@each_rank(dp=1, tp=2)
def test_a_wrapped_model_is_loaded_and_other_names_are_refused(ctx: ParallelContext, tmp_path: Path, make: str) -> None:
    want = saved(ctx, tmp_path / "c", OPTIMIZERS[make])
    model = Three("kvq")
    whole = nn.ModuleDict({"module": model})
    wrapped = OPTIMIZERS[make](whole)
    load(tmp_path / "c", wrapped, model_key="optimizer")
    assert averages(model, wrapped) == want
    other = nn.ModuleDict({"q": model.q, "w": model.k, "v": model.v})
    with pytest.raises(ValueError, match=r"in group 0, parameters \['k.weight'\] .* has \['w.weight'\]"):
        load(tmp_path / "c", OPTIMIZERS[make](other), model_key="optimizer")


@pytest.mark.parametrize("zero", [False, True])
@each_rank(dp=1, tp=1)
def test_other_shapes_are_refused(ctx: ParallelContext, tmp_path: Path, zero: bool) -> None:
    def made(*sizes: int) -> torch.optim.Optimizer:
        params = [nn.Parameter(torch.ones(n)) for n in sizes]
        optimizer = Zero1(AdamW, params) if zero else AdamW(params)
        for p in params:
            p.grad = torch.ones_like(p)
        tpcore.optimizer_step(optimizer)
        return optimizer

    with pytest.warns(UserWarning, match="without the names"):
        save({"optimizer": made(4, 6)}, tmp_path / "c")
    with pytest.raises(ValueError, match=r"exp_avg.* shape \(4,\).* \(6,\)"):
        load(tmp_path / "c", made(6, 4), model_key="optimizer")


KINDS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": AdamW,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@each_rank(dp=1, tp=1)
def test_the_state_of_another_kind_of_optimizer_is_refused(
    ctx: ParallelContext, tmp_path: Path, kind: str, zero: bool
) -> None:
    p = nn.Parameter(torch.ones(4))
    written = KINDS[kind]([p])
    p.grad = torch.ones(4)
    written.step()
    state: dict[str, Any] = written.state_dict()
    state["param_groups"][0]["param_names"] = ["p"]
    save({"model": {"p": p}, "optimizer": state}, tmp_path / "c")
    for name, make in KINDS.items():
        optimizer = make([p])
        if zero:
            group = optimizer.param_groups[0]
            optimizer = Zero1(type(optimizer), [p], lr=group["lr"], **{k: group[k] for k in {"momentum"} & {*group}})
        fits = not any(s for s in state["state"].values() if s.get("momentum_buffer", 0) is not None)
        if name.split()[0] == kind.split()[0] or fits:
            load(tmp_path / "c", optimizer, model_key="optimizer")
        else:
            with pytest.raises(ValueError, match="saved by another kind of optimizer"):
                load(tmp_path / "c", optimizer, model_key="optimizer")


# -- layouts --------------------------------------------------------------------------------------------------
LAYOUTS: dict[str, tuple[Block, ...]] = {"whole": (Block(16),), "strided": (Block(8), Block(8)), "heads": ()}


def trained(model: Heads, ctx: ParallelContext, *, names: bool = True) -> torch.optim.Optimizer:
    """AdamW after two steps, by gradients that are functions of the place in the full tensor."""
    spec, n = model.shard_specs["weight"], ctx.comm("tp").size
    full = torch.arange(48.0).reshape(16, 3)
    with torch.no_grad():
        model.weight.copy_(spec.shard(full, ctx.coord("tp"), n))
    optimizer = AdamW(model.named_parameters() if names else model.parameters(), lr=0.1)
    for step in (1, 2):
        model.weight.grad = spec.shard(full * step - 7, ctx.coord("tp"), n)
        optimizer.step()
    return optimizer


def _saved_heads(path: Path, tp: int, blocks: str, *, names: bool = True) -> None:
    def rank(ctx: ParallelContext) -> None:
        model = Heads(*LAYOUTS[blocks], dtype=torch.float32)
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
    _saved_heads(tmp_path / "c", 4, there)

    def rank(ctx: ParallelContext) -> None:
        want = Heads(*LAYOUTS[here], dtype=torch.float32)
        want_optimizer = trained(want, ctx)
        model = Heads(*LAYOUTS[here], dtype=torch.float32)
        rest = load(tmp_path / "c", model)
        assert torch.equal(model.weight, want.weight)
        _same_state(rest["optimizer"], want_optimizer)
        optimizer = AdamW(model.named_parameters(), lr=0.1)
        load(tmp_path / "c", optimizer, model_key="optimizer")
        _same_state(optimizer.state_dict(), want_optimizer)
        for parameter, stepped in ((model, optimizer), (want, want_optimizer)):
            parameter.weight.grad = torch.ones_like(parameter.weight)
            stepped.step()
        assert torch.equal(model.weight, want.weight)

    run_ranks(Mesh({"dp": 1, "tp": tp}), rank)


def test_state_without_names_is_refused_where_the_layouts_differ(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="without the names of its parameters"):
        _saved_heads(tmp_path / "c", 2, "whole", names=False)

    def rank(ctx: ParallelContext) -> None:
        same = Heads(Block(16), dtype=torch.float32)
        _same_state(load(tmp_path / "c", same)["optimizer"], trained(Heads(Block(16), dtype=torch.float32), ctx))
        other = Heads(*LAYOUTS["strided"], dtype=torch.float32)
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


def by_place(
    model: nn.Module, ctx: ParallelContext, values: Callable[[Tensor], Tensor]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each parameter, and this rank's part of a tensor that tells names apart and places, which count from 1."""
    for name, p in model.named_parameters():
        mark = sharding(p)
        shape = mark.layout.shape if mark else tuple(p.shape)
        full = values(torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)) + sum(map(ord, name))
        yield p, mark.layout.shard(full, ctx.rank, ctx.mesh) if mark else full


def filled(ctx: ParallelContext) -> Staged:
    model = Staged(ctx)
    with torch.no_grad():
        for p, part in by_place(model, ctx, lambda place: place / 100):
            p.copy_(part)
    return model


def test_an_optimizer_of_other_parameters_is_named_only_where_others_may_be() -> None:
    layer, other = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [*layer.parameters()]}, {"params": [other]}], lr=0.1)
    with pytest.raises(ValueError, match=r"group 1 .* not those of Linear.*make the optimizer of model"):
        name_parameters(optimizer, layer)
    name_parameters(optimizer, layer, others=True)
    assert not any("param_names" in group for group in optimizer.param_groups)
    mine = torch.optim.SGD(layer.parameters(), lr=0.1)
    name_parameters(mine, layer)
    assert mine.param_groups[0]["param_names"] == ["weight", "bias"]
