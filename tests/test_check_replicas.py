"""What ranks should hold alike, and ``check_replicas``, which names the first thing that they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Heads, Net, cut_net, ids_of, loss_of, plain_net
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.testing import run_ranks

MESH = Mesh({"dp": 2, "tp": 2})


def backward(ctx: ParallelContext, net: nn.Module, seed: int = 0) -> None:
    loss_of(net, ids_of(seed, 8).chunk(2)[ctx.coord("dp")]).backward()


@pytest.mark.parametrize("zero", [False, True])
def test_ranks_that_agree(zero: bool) -> None:
    full = plain_net().state_dict()

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full, ctx)
        params = net.named_parameters()
        optimizer = Zero1(torch.optim.AdamW, params) if zero else torch.optim.AdamW(params)
        tpcore.diagnose.check_replicas(net, optimizer)
        for step in range(2):
            backward(ctx, net, step)
            tpcore.diagnose.check_replicas(net)
            tpcore.optimizer_step(optimizer, max_norm=1.0)
            tpcore.diagnose.check_replicas(net, optimizer)
            optimizer.zero_grad()
        sparse = cut_net(plain_net(sparse=True).state_dict(), ctx, sparse=True)
        backward(ctx, sparse)
        tpcore.diagnose.check_replicas(sparse)

    run_ranks(MESH, rank)


def _seed(ctx: ParallelContext, net: Net) -> nn.Module:
    torch.manual_seed(ctx.rank)
    net.norm = nn.Linear(8, 8).double()
    return net


def _weight(ctx: ParallelContext, net: Net) -> nn.Module:
    if ctx.rank == 3:
        net.up.weight.data[0, 0] += 1
    return net


def _unused(ctx: ParallelContext, net: Net) -> nn.Module:
    backward(ctx, net)
    if ctx.rank == 1:
        net.norm.bias.grad = None
    return net


def _uncovered(ctx: ParallelContext, net: Net) -> nn.Module:
    """A plain norm on the part of the sequence that a rank has."""
    norm = nn.LayerNorm(4, dtype=torch.float64)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    norm(ctx.comm("tp").split(x, 1)).square().sum().backward()
    return norm


def _broadcast(ctx: ParallelContext, net: Net) -> nn.Module:
    for p in net.parameters():
        p.data = ctx.world.broadcast(p.detach(), 0)
    return net


def _averaged(ctx: ParallelContext, net: Net) -> nn.Module:
    backward(ctx, net)
    for p in net.parameters():
        if p.grad is not None:
            p.grad = ctx.world.all_reduce(p.grad) / 4
    return net


WRONG: dict[str, tuple[Callable[[ParallelContext, Net], nn.Module], str]] = {
    "seed": (_seed, r"parameter 'norm\.weight' differs between rank 0 .*another seed"),
    "weight": (_weight, r"parameter 'up\.weight' differs between rank 1 \(dp 0, tp 1\) and rank 3 \(dp 1, tp 1\)"),
    "unused": (_unused, r"the gradient of 'norm\.bias' .*rank 1 \(dp 0, tp 1\).*one has none"),
    "uncovered": (_uncovered, r"the gradient of 'weight' differs .*sequence_parallel=True"),
    "broadcast": (_broadcast, r"'embed\.weight' has the same values on .* different parts .*process_group=ctx"),
    "averaged": (_averaged, r"the gradient of 'embed\.weight' has the same values on .* averaged over tp"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_first_that_differs_is_named_on_every_rank(case: str) -> None:
    change, match = WRONG[case]
    full = plain_net().state_dict()

    def rank(ctx: ParallelContext) -> None:
        with pytest.raises(ValueError, match=f"(?s){match}"):
            tpcore.diagnose.check_replicas(change(ctx, cut_net(full, ctx)))

    run_ranks(MESH, rank)


def test_key_heads_that_several_ranks_hold() -> None:
    def rank(ctx: ParallelContext) -> None:
        heads = Heads()
        tpcore.diagnose.check_replicas(heads)
        if ctx.rank == 1:
            heads.weight.data[-1, 0] += 1
        with pytest.raises(ValueError, match=r"'weight' differs between rank 0 \(tp 0\) and rank 1 \(tp 1\)"):
            tpcore.diagnose.check_replicas(heads)

    run_ranks(Mesh({"dp": 1, "tp": 4}), rank)


@pytest.mark.parametrize("zero", [False, True])
def test_a_state_that_differs(zero: bool) -> None:
    full = plain_net().state_dict()

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full, ctx)
        params = net.named_parameters()
        optimizer: Any = Zero1(torch.optim.AdamW, params) if zero else torch.optim.AdamW(params)
        backward(ctx, net)
        tpcore.optimizer_step(optimizer)
        state: dict[str, Tensor] = optimizer.state[net.norm.weight]
        if ctx.rank == 3:
            state["exp_avg"].add_(1)
        with pytest.raises(ValueError, match=r"state 'exp_avg of norm\.weight' differs between rank . .*rank 3"):
            tpcore.diagnose.check_replicas(net, optimizer)
        if ctx.rank == 3:
            state["exp_avg"].sub_(1)
            state["step"].add_(1)
        with pytest.raises(ValueError, match=r"state '\w+ of norm\.weight' differs between rank . .*rank 3"):
            tpcore.diagnose.check_replicas(net, optimizer)

    run_ranks(MESH, rank)


def test_tp_ranks_with_different_batches() -> None:
    """The gradients of a model that is cut everywhere are the same all the same, and wrong."""
    full = plain_net().state_dict()

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full, ctx)
        tpcore.diagnose.check_replicas(net, batch={"ids": ids_of(ctx.coord("dp")), "weights": [torch.ones(3), 2]})
        wrong = ids_of(ctx.rank)
        loss_of(net, wrong).backward()
        tpcore.diagnose.check_replicas(net)
        match = r"the batch \(tensor 1\) differs between rank 0 \(dp 0, tp 0\) and rank 1 .*counts all ranks"
        with pytest.raises(ValueError, match=match):
            tpcore.diagnose.check_replicas(net, batch=(torch.ones(2), wrong))

    run_ranks(MESH, rank)


@pytest.mark.parametrize("zero", [False, True])
def test_an_option_that_differs(zero: bool) -> None:
    """A scheduler that is stepped on rank 0 only."""

    def rank(ctx: ParallelContext) -> None:
        net = Net()
        params = [{"params": [p]} for p in net.parameters()]
        optimizer: Any = Zero1(torch.optim.AdamW, params) if zero else torch.optim.AdamW(params)
        tpcore.diagnose.check_replicas(net, optimizer)
        if ctx.rank == 0:
            optimizer.param_groups[1]["lr"] = torch.tensor(1e-5)
        with pytest.raises(ValueError, match=r"option 'lr of group 1' differs .* a scheduler that some ranks"):
            tpcore.diagnose.check_replicas(net, optimizer)

    run_ranks(MESH, rank)
