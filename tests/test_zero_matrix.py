"""Every optimizer on stages: twenty clipped steps of Zero1 are those of the plain optimizer.

Gradients are functions of the step and of the place in the full tensor. Each dp rank has another one, of
the same mean. So a mesh of sixteen ranks takes no forward.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_zero import OPTIMIZERS, STEPS
from tiers import tiers
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.layers.sharding import sharding
from tpcore.layout.layout import Slot
from tpcore.testing import run_ranks

MESHES = [{"pp": 2, "dp": dp, "tp": tp} for dp in (2, 3, 4) for tp in (1, 2)]


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    places = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    return torch.sin(places + 3 * step + sum(map(ord, name)))


class Small(nn.Module):
    """A table over stages and tp, padded; a layer on each of up to two stages; a norm that all ranks hold."""

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        both = ctx.comm("pp", "tp")
        self.table = tpcore.ParallelEmbedding(10, 4, pad=True, group=both)
        self.layers = nn.ModuleDict()
        for i in range(2):
            slot = Slot("pp", i, 2)
            if slot.coordinate(ctx.mesh) == ctx.coord("pp"):
                self.layers[str(i)] = layer = tpcore.ColumnParallelLinear(4, 6, bias=False)
                layer.place(slot)
        self.norm = nn.LayerNorm(4)


def groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    flat = [(n, p) for n, p in named.items() if n.endswith("bias")]
    return [
        {"params": [(n, p) for n, p in named.items() if not n.endswith("bias")]},
        {"params": flat, "lr": 4e-3},
    ]


SHAPES: dict[str, tuple[int, ...]] = {"table.weight": (10, 4), "norm.weight": (4,), "norm.bias": (4,)}
SHAPES |= {f"layers.{i}.weight": (6, 4) for i in range(2)}
FULL = {step: {n: gradient(n, s, step) for n, s in SHAPES.items()} for step in range(-1, STEPS)}


def plainly(kind: str) -> tuple[dict[str, nn.Parameter], list[Tensor]]:
    """The full parameters after the steps, and the norms."""
    cls, options = OPTIMIZERS[kind]
    named = {n: nn.Parameter(values.clone()) for n, values in FULL[-1].items()}
    optimizer, norms = cls(groups(named), **options), []
    for step in range(STEPS):
        for name, p in named.items():
            p.grad = FULL[step][name].clone()
        norms.append(nn.utils.clip_grad_norm_(named.values(), 3.0))
        optimizer.step()
    return named, norms


@pytest.mark.parametrize("kind", tiers(["adamw", "sgd"], OPTIMIZERS))
def test_twenty_steps_on_stages(kind: str) -> None:
    want, norms = plainly(kind)
    cls, options = OPTIMIZERS[kind]

    def rank(ctx: ParallelContext) -> None:
        model, dp = Small(ctx).double(), ctx.comm("dp").size
        named = dict(model.named_parameters())

        def part(name: str, full: Tensor) -> Tensor:
            found = sharding(named[name])
            return full.clone() if found is None else found.layout.shard(full, ctx.rank, ctx.mesh)

        for name, p in named.items():
            p.data = part(name, FULL[-1][name])
        optimizer = Zero1(cls, groups(named), bucket_mb=1e-3, **options)
        apart = ctx.coord("dp") - (dp - 1) / 2
        for step, norm in enumerate(norms):
            for name, p in named.items():
                p.grad = part(name, FULL[step][name] * (1 + apart))
            got = tpcore.optimizer_step(optimizer, max_norm=3.0)
            torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)
        for name, p in named.items():
            torch.testing.assert_close(p.detach(), part(name, want[name].detach()), rtol=1e-12, atol=1e-12)

    for mesh in MESHES:
        run_ranks(Mesh(mesh), rank)
