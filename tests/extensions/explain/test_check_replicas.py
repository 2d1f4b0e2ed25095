"""What ranks should hold alike, and ``check_replicas``, which names the first thing that they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.nets import Heads, Net, cut_net, ids_of, loss_of, plain_net
from helpers.worlds import each_rank
from test_pipeline_steps import staged, trained
from torch import nn

import tpcore
from tpcore import ParallelContext, Zero1
from tpcore_explain import check_replicas

Found = tuple[nn.Module, Any, Any]
"""What ``check_replicas`` takes: a model, an optimizer, a batch."""


def backward(ctx: ParallelContext, net: nn.Module, seed: int = 0) -> None:
    loss_of(net, ids_of(seed, 8).chunk(2)[ctx.coord("dp")]).backward()


def adamw(parameters: Any, zero: bool) -> Any:
    return Zero1(torch.optim.AdamW, parameters) if zero else torch.optim.AdamW(parameters)


@pytest.mark.parametrize("zero", [False, True])
@each_rank(dp=2, tp=2)
def test_ranks_that_agree(ctx: ParallelContext, zero: bool) -> None:
    net = cut_net(plain_net().state_dict())
    optimizer = adamw(net.named_parameters(), zero)
    check_replicas(net, optimizer)
    for step in range(2):
        backward(ctx, net, step)
        check_replicas(net)
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        check_replicas(net, optimizer)
        optimizer.zero_grad()
    sparse = cut_net(plain_net(sparse=True).state_dict(), sparse=True)
    backward(ctx, sparse)
    check_replicas(sparse)
    check_replicas(net, batch={"ids": ids_of(ctx.coord("dp")), "weights": [torch.ones(3), 2]})


def _seed(ctx: ParallelContext, net: Net) -> Found:
    torch.manual_seed(ctx.rank)
    net.norm = nn.Linear(8, 8).double()
    return net, None, None


def _weight(ctx: ParallelContext, net: Net) -> Found:
    if ctx.rank == 3:
        net.up.weight.data[0, 0] += 1
    return net, None, None


def _unused(ctx: ParallelContext, net: Net) -> Found:
    backward(ctx, net)
    if ctx.rank == 1:
        net.norm.bias.grad = None
    return net, None, None


def _uncovered(ctx: ParallelContext, net: Net) -> Found:
    """A plain norm on the part of the sequence that a rank has."""
    norm = nn.LayerNorm(4, dtype=torch.float64)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    norm(ctx.comm("tp").split(x, 1)).square().sum().backward()
    return norm, None, None


def _broadcast(ctx: ParallelContext, net: Net) -> Found:
    for p in net.parameters():
        p.data = ctx.world.broadcast(p.detach(), 0)
    return net, None, None


def _averaged(ctx: ParallelContext, net: Net) -> Found:
    backward(ctx, net)
    for p in net.parameters():
        if p.grad is not None:
            p.grad = ctx.world.all_reduce(p.grad) / 4
    return net, None, None


def _state(key: str, zero: bool) -> Callable[[ParallelContext, Net], Found]:
    def change(ctx: ParallelContext, net: Net) -> Found:
        optimizer = adamw(net.named_parameters(), zero)
        backward(ctx, net)
        tpcore.optimizer_step(optimizer)
        if ctx.rank == 3:
            optimizer.state[net.norm.weight][key].add_(1)
        return net, optimizer, None

    return change


def _option(zero: bool) -> Callable[[ParallelContext, Net], Found]:
    """A scheduler that is stepped on rank 0 only."""

    def change(ctx: ParallelContext, net: Net) -> Found:
        optimizer = adamw([{"params": [p]} for p in net.parameters()], zero)
        check_replicas(net, optimizer)
        if ctx.rank == 0:
            optimizer.param_groups[1]["lr"] = torch.tensor(1e-5)
        return net, optimizer, None

    return change


def _batch(ctx: ParallelContext, net: Net) -> Found:
    """The gradients of a model that is cut everywhere are the same all the same, and wrong."""
    wrong = ids_of(ctx.rank)
    loss_of(net, wrong).backward()
    check_replicas(net)
    return net, None, (torch.ones(2), wrong)


STATE = r"state '\w+ of norm\.weight' differs between rank . .*rank 3"
WRONG: dict[str, tuple[Callable[[ParallelContext, Net], Found], str]] = {
    "seed": (_seed, r"parameter 'norm\.weight' differs between rank 0 .*another seed"),
    "weight": (_weight, r"parameter 'up\.weight' differs between rank 1 \(dp 0, tp 1\) and rank 3 \(dp 1, tp 1\)"),
    "unused": (_unused, r"the gradient of 'norm\.bias' .*rank 1 \(dp 0, tp 1\).*one has none"),
    "uncovered": (_uncovered, r"the gradient of 'weight' differs .*sequence_parallel=True"),
    "broadcast": (_broadcast, r"'embed\.weight' has the same values on .* different parts .*process_group=ctx"),
    "averaged": (_averaged, r"the gradient of 'embed\.weight' has the same values on .* averaged over tp"),
    "moment": (_state("exp_avg", False), STATE.replace(r"\w+", "exp_avg")),
    "moment of Zero1": (_state("exp_avg", True), STATE.replace(r"\w+", "exp_avg")),
    "step": (_state("step", False), STATE),
    "step of Zero1": (_state("step", True), STATE),
    "option": (_option(False), r"option 'lr of group 1' differs .* a scheduler that some ranks"),
    "option of Zero1": (_option(True), r"option 'lr of group 1' differs .* a scheduler that some ranks"),
    "batch": (_batch, r"the batch \(tensor 1\) differs between rank 0 \(dp 0, tp 0\) and rank 1 .*counts all ranks"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", WRONG)
@each_rank(dp=2, tp=2)
def test_the_first_that_differs_is_named_on_every_rank(ctx: ParallelContext, case: str) -> None:
    change, match = WRONG[case]
    net, optimizer, batch = change(ctx, cut_net(plain_net().state_dict()))
    with pytest.raises(ValueError, match=f"(?s){match}"):
        check_replicas(net, optimizer, batch=batch)


@each_rank(dp=1, tp=4)
def test_key_heads_that_several_ranks_hold(ctx: ParallelContext) -> None:
    heads = Heads()
    check_replicas(heads)
    if ctx.rank == 1:
        heads.weight.data[-1, 0] += 1
    with pytest.raises(ValueError, match=r"'weight' differs between rank 0 \(tp 0\) and rank 1 \(tp 1\)"):
        check_replicas(heads)


@each_rank(pp=2, dp=2, tp=1)
def test_stages_agree_after_steps_of_zero1(ctx: ParallelContext) -> None:
    model = staged(ctx)
    optimizer = Zero1(torch.optim.AdamW, model.named_parameters(), lr=0.02, bucket_mb=1e-2)
    trained(model, optimizer, ctx, "recomputed", range(2))
    check_replicas(model, optimizer)
