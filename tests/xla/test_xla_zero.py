"""Zero1 on replicas: the steps of the plain optimizer, by one program for all ranks."""

from __future__ import annotations

from typing import Any

import torch
from nets import Net, cut_net, ids_of, loss_of
from onreplicas import on_replicas
from tpcore_neuron.testing import programs

import tpcore
from tpcore import Zero1
from tpcore.runtime.context import ParallelContext

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


def training(ctx: ParallelContext) -> list[tuple[bool, str, Any]]:
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
    every = on_replicas(4, 2, training)
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
