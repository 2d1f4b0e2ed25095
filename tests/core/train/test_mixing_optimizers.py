"""Optimizers that mix the entries of a parameter: refused where a rank has a part of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.worlds import each_rank
from test_zero import Mixes
from torch import Tensor, nn

import tpcore
from tpcore import ParallelContext
from tpcore.train.step import stepping_of

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class LAMB(torch.optim.SGD):
    """Known by its name."""


class Closures(torch.optim.SGD):
    """Takes no step of its own."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("needs a closure")


MIXING: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    **({"Muon": torch.optim.Muon} if hasattr(torch.optim, "Muon") else {}),  # not in torch 2.8
    "LBFGS": torch.optim.LBFGS,
    "LAMB": lambda p: LAMB(p, lr=0.1),
    "with no known name": lambda p: Mixes(p, lr=0.1),
    "at the start of a warm-up": lambda p: Mixes(p, lr=0.0),
}
ELEMENTWISE: dict[str, Make] = {
    name: getattr(torch.optim, name)
    for name in ("SGD", "AdamW", "Adam", "Adagrad", "Adamax", "RMSprop", "NAdam", "RAdam", "Rprop", "ASGD")
} | {"AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True, lr=torch.tensor(0.1), betas=(0.8, 0.9))}


def loss_of(layer: nn.Module) -> Tensor:
    return layer(torch.ones(2, 4)).square().sum()


@pytest.mark.parametrize("make", MIXING)
@each_rank(dp=1, tp=2)
def test_an_optimizer_that_mixes_entries_is_refused(ctx: ParallelContext, make: str) -> None:
    layer = tpcore.ColumnParallelLinear(4, 8, bias=False)
    optimizer = MIXING[make]([layer.weight])
    loss_of(layer).backward()
    before = layer.weight.detach().clone()
    for step in (partial(tpcore.optimizer_step, optimizer), optimizer.step):
        with pytest.raises(ValueError, match=r"sharded over tp, and \w+ mixes a parameter's entries: "):
            step()
    assert torch.equal(before, layer.weight)


@pytest.mark.parametrize("make", [m for m in MIXING if m != "LBFGS"])
@each_rank(dp=2, tp=1)
def test_it_steps_parameters_that_each_rank_has_whole(ctx: ParallelContext, make: str) -> None:
    layer = nn.Linear(4, 8, bias=False)
    loss_of(layer).backward()
    tpcore.optimizer_step(MIXING[make]([layer.weight]))


@pytest.mark.parametrize("make", ELEMENTWISE)
@each_rank(dp=1, tp=2)
def test_others_are_tried_once_and_step_as_the_whole(ctx: ParallelContext, make: str) -> None:
    layer, plain = (tpcore.ColumnParallelLinear(4, 8, bias=False).double(), nn.Linear(4, 8, bias=False).double())
    with torch.no_grad():
        plain.weight.copy_(ctx.comm("tp").all_gather(layer.weight.detach(), 0))
    steps: list[int] = []
    ours, theirs = ELEMENTWISE[make]([layer.weight]), ELEMENTWISE[make]([plain.weight])
    for _ in range(3):
        for model, optimizer in ((layer, ours), (plain, theirs)):
            optimizer.zero_grad()
            model(torch.ones(2, 4).double()).square().sum().backward()
        tpcore.optimizer_step(ours)
        theirs.step()
        steps.append(len(vars(ours)))
    assert steps[0] == steps[-1]
    assert torch.allclose(ctx.comm("tp").all_gather(layer.weight.detach(), 0), plain.weight, rtol=1e-12)


@each_rank(dp=1, tp=2)
def test_what_cannot_be_tried_is_said_once(ctx: ParallelContext) -> None:
    optimizer = Closures(tpcore.ColumnParallelLinear(4, 8).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="Closures cannot be tried"):
        stepping_of(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepping_of(optimizer)
