"""An optimizer's saved state goes to its parameters by name, and to an optimizer of its kind alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import each_rank

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.checkpoint import load, save
from tpcore.testing import run_ranks

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
def test_other_shapes_are_refused(tmp_path: Path, zero: bool) -> None:
    def made(*sizes: int) -> torch.optim.Optimizer:
        params = [nn.Parameter(torch.ones(n)) for n in sizes]
        optimizer = Zero1(AdamW, params) if zero else AdamW(params)
        for p in params:
            p.grad = torch.ones_like(p)
        tpcore.optimizer_step(optimizer)
        return optimizer

    def check(ctx: ParallelContext) -> None:
        with pytest.warns(UserWarning, match="without the names"):
            save({"optimizer": made(4, 6)}, tmp_path / "c")
        with pytest.raises(ValueError, match=r"exp_avg.* shape \(4,\).* \(6,\)"):
            load(tmp_path / "c", made(6, 4), model_key="optimizer")

    run_ranks(Mesh({"dp": 1, "tp": 1}), check)


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
