"""A model that torch's own parallelism has cut is refused before anything is reduced, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tpcore
from tpcore import Mesh, ParallelContext

ATTEMPTS: dict[str, Callable[[nn.Module], Any]] = {
    "clip": lambda model: tpcore.clip_grad_norm(model, 1.0),
    "mean": lambda model: tpcore.reduce_gradients(model.parameters()),
    "step": lambda model: tpcore.optimizer_step(torch.optim.SGD(model.named_parameters(), lr=0.1)),
    "Zero1": lambda model: tpcore.Zero1(torch.optim.SGD, model.named_parameters(), lr=0.1),
}


def refused(ctx: ParallelContext) -> dict[str, str]:
    """What each of them says of a model that FSDP2 has cut over real processes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (ctx.mesh.size,)))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    before: list[Tensor] = [p.grad.to_local().clone() for p in model.parameters()]
    told = {}
    for name, attempt in ATTEMPTS.items():
        try:
            attempt(model)
        except ValueError as e:
            told[name] = str(e)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad.to_local(), grad)
    return told


def test_fsdp2_is_refused_with_the_remedy(pool: Any) -> None:
    for told in pool.run(Mesh({"dp": 2, "tp": 2}), refused):
        assert told.keys() == ATTEMPTS.keys()
        for text in told.values():
            assert "is a DTensor: fully_shard (FSDP2)" in text
            assert "tpcore.Zero1" in text
