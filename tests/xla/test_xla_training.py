"""Training parts on replicas: gradients over dp, clipping, ZeRO-1, dropout streams, the random state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.nets import Net, cut_net, ids_of, loss_of
from onreplicas import on_replicas

import tpcore
from tpcore import Zero1
from tpcore.runtime.context import ParallelContext
from tpcore_neuron.testing import programs


def two_masks(ctx: ParallelContext) -> torch.Tensor:
    shared = F.dropout(torch.ones(64).to(ctx.device), 0.5)
    with tpcore.random.sharded():
        return torch.stack([shared, F.dropout(torch.ones(64).to(ctx.device), 0.5)])


def masks_of_steps(ctx: ParallelContext) -> tuple[list[torch.Tensor], list[int]]:
    """Between steps torch_xla makes a new seed, of 64 bits; each is kept and put back."""
    tpcore.random.manual_seed(-7)  # as torch takes them
    tpcore.random.manual_seed(7)
    drawn, states = [], []
    for _ in range(6):
        states.append(tpcore.random.get_state())
        drawn.append(two_masks(ctx))
        ctx.backend.mark_step()
    for state, masks in zip(states, list(drawn), strict=True):
        tpcore.random.set_state(state)
        drawn.append((two_masks(ctx) == masks).all())
        ctx.backend.mark_step()
    return drawn, [int(state["device"]) for state in states]


def test_dropout_streams_of_many_steps():
    for drawn, states in on_replicas(2, 2, masks_of_steps):
        assert min(states) < 0 < max(states)  # with and without the highest bit
        assert all(drawn[6:])
        assert len({tuple(mask.flatten().tolist()) for mask in drawn[:6]}) == 6


def infinite_logits(ctx: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank has nothing but -inf: forbidden tokens. What is gathered later must not notice."""
    logits = torch.zeros(3, 8)
    logits[:, :4] = float("-inf")
    mine = logits.chunk(2, 1)[ctx.coord("tp")].to(ctx.device)
    loss = tpcore.parallel_cross_entropy(mine, torch.tensor([5, 6, 7]).to(ctx.device))
    later = ctx.comm("tp").all_gather(torch.ones(2).to(ctx.device), 0)
    ctx.backend.mark_step()
    return loss, later


def test_infinities_stay_where_they_are():
    for loss, later in on_replicas(2, 2, infinite_logits):
        torch.testing.assert_close(loss, torch.full((3,), 4.0).log())
        assert torch.equal(later, torch.ones(4))


def autocast(ctx: ParallelContext) -> tuple[str, torch.Tensor]:
    layer = tpcore.RowParallelLinear(8, 4, input_is_parallel=True, bias=False)
    torch.nn.init.ones_(layer.weight)
    layer.to(ctx.device)
    x = torch.full((2, 4), 0.5).to(ctx.device).requires_grad_()
    with torch.autocast("xla", dtype=torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    ctx.backend.mark_step()
    return str(y.dtype), y.float(), x.grad


def test_autocast():
    for dtype, y, grad in on_replicas(2, 2, autocast):
        assert dtype == "torch.bfloat16"
        assert torch.equal(y, torch.full((2, 4), 4.0))
        assert torch.equal(grad, torch.full((2, 4), 4.0))


# -- ZeRO-1 -------------------------------------------------------------------------------------------------
STEPS, BATCH = 5, 8


def plain_training() -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    plain = Net().float()
    full = {k: v.clone() for k, v in plain.state_dict().items()}
    opt = torch.optim.AdamW(plain.named_parameters(), lr=1e-2)
    for step in range(STEPS):
        opt.zero_grad()
        loss_of(plain, ids_of(step, BATCH)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        opt.step()
    return full, dict(plain.named_parameters())


def zero_training(ctx: ParallelContext) -> list[tuple[bool, str, Any]]:
    full, want = plain_training()
    net = cut_net(full).float()
    opt = Zero1(torch.optim.AdamW, net.named_parameters(), lr=1e-2)  # before the model is moved
    tpcore.layers.move_model_to_device(net, ctx.device)
    dp = ctx.comm("dp").size
    for step in range(STEPS):
        opt.zero_grad()
        loss_of(net, ids_of(step, BATCH).chunk(dp)[ctx.coord("dp")].to(ctx.device)).backward()
        tpcore.optimizer_step(opt, max_norm=0.3)
    dp_groups = ctx.comm("dp").group.partition
    made = [
        (p.compiled, p.digest, [c.kind for c in p.collectives if c.groups == dp_groups])
        for p in programs()
        if p.what == "sync"
    ]
    tpcore.layers.move_model_to_device(net, "cpu")
    n, r, specs = ctx.comm("tp").size, ctx.coord("tp"), tpcore.layers.shard_specs(net)
    for name, p in net.named_parameters():
        shard = specs[name].shard(want[name].detach(), r, n)
        torch.testing.assert_close(p.detach(), shard, rtol=0, atol=1e-6, msg=lambda m, k=name: f"{k}: {m}")
    return made


def test_steps_are_those_of_the_plain_optimizer_and_one_program():
    every = on_replicas(4, 2, zero_training)
    assert all(made == every[0] for made in every)
    assert [compiled for compiled, _, _ in every[0]] == [True, True, False, False, False]
    # one bucket each way, and the norm
    assert every[0][-1][2] == ["reduce_scatter add", "all_reduce add", "all_gather"]


def masters(ctx: ParallelContext) -> None:
    """bfloat16 weights with float32 masters move by less than bfloat16 can say, and are not lost."""
    weight = torch.nn.Parameter(torch.linspace(1, 2, 8).to(torch.bfloat16).to(ctx.device))
    start = weight.detach().cpu().float()
    opt = Zero1(torch.optim.SGD, [("weight", weight)], lr=1.0, master_dtype=torch.float32)
    for _ in range(8):
        weight.grad = torch.full_like(weight, 2.0**-11)
        tpcore.optimizer_step(opt)
    ((_, values),) = opt.state_dict()["state"].items()
    assert torch.equal(values["master"].cpu(), start - 8 * 2.0**-11)
    assert torch.equal(weight.detach().cpu(), (start - 8 * 2.0**-11).bfloat16())


def test_masters_keep_what_bfloat16_has_no_room_for():
    on_replicas(2, 1, masters)
