"""Zero1 steps as the plain optimizer on the whole batch does, whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import cut_net, ids_of, loss_of, plain_net
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.testing import run_ranks


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, https://arxiv.org/abs/2302.06675: one that torch has not."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(torch.sign(average * first + p.grad * (1 - first)), alpha=group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)


Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 5e-3, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "lion": (Lion, {"lr": 1e-3}),
}
STEPS, BATCH = 20, 12
MESHES = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2)]


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups, by the number of dims, the second at another rate."""
    named = list(net.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1]},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "lr": 5e-3},
    ]


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, part: Callable[[Tensor], Tensor], steps: Any, norm: Any
) -> list[Tensor]:
    """The norms, of steps clipped to half of the first one's."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    seen = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, part(ids_of(step, BATCH))).backward()
        seen.append(norm(optimizer))
        schedule.step()
    return seen


def plainly(optimizer: torch.optim.Optimizer) -> Tensor:
    norm = nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.3)
    optimizer.step()
    return norm


def cut(optimizer: torch.optim.Optimizer) -> Tensor:
    return tpcore.optimizer_step(optimizer, max_norm=0.3)


def mine(ctx: ParallelContext) -> Callable[[Tensor], Tensor]:
    return lambda ids: ids.chunk(ctx.comm("dp").size)[ctx.coord("dp")]


def assert_equals(net: nn.Module, plain: nn.Module, ctx: ParallelContext, tolerance: float) -> None:
    n, r, specs = ctx.comm("tp").size, ctx.coord("tp"), tpcore.shard_specs(net)
    want = dict(plain.named_parameters())
    for name, p in net.named_parameters():
        shard = specs[name].shard(want[name].detach(), r, n)
        torch.testing.assert_close(
            p.detach(), shard, rtol=tolerance, atol=tolerance, msg=lambda m, k=name: f"{k}: {m}"
        )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_are_those_of_the_plain_optimizer(kind: str) -> None:
    cls, options = OPTIMIZERS[kind]
    plain = plain_net()
    full = {k: v.clone() for k, v in plain.state_dict().items()}
    norms = train(plain, cls(groups_of(plain), **options), lambda ids: ids, range(STEPS), plainly)

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full, ctx)
        optimizer = Zero1(cls, groups_of(net), bucket_mb=1e-3, **options)
        seen = train(net, optimizer, mine(ctx), range(STEPS), cut)
        torch.testing.assert_close(torch.stack(seen), torch.stack(norms), rtol=1e-9, atol=0)
        assert_equals(net, plain, ctx, 1e-12)

    for dp, tp in MESHES:
        run_ranks(Mesh({"dp": dp, "tp": tp}), rank)
