"""A model that torch's own parallelism has cut is refused before anything is reduced, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tpcore
from tpcore import Mesh, ParallelContext

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's fully_shard does not run on CPUs"
)
ATTEMPTS: dict[str, Callable[[nn.Module], Any]] = {
    "clip": lambda model: tpcore.clip_grad_norm(model, 1.0),
    "mean": lambda model: tpcore.reduce_gradients(model.parameters()),
    "step": lambda model: tpcore.optimizer_step(torch.optim.SGD(model.named_parameters(), lr=0.1)),
    "Zero1": lambda model: tpcore.Zero1(torch.optim.SGD, model.named_parameters(), lr=0.1),
}


def refused(ctx: ParallelContext) -> dict[str, str]:
    """What each of them says of a model that FSDP2 has sharded over real processes."""
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


def refused_later(ctx: ParallelContext) -> list[str]:
    """What the steps of optimizers that were made before say, once their parameters are replaced."""
    told = []
    for make in (
        lambda model: tpcore.Zero1(torch.optim.SGD, model.named_parameters(), lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        optimizer = make(model)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (ctx.mesh.size,)))
        model(torch.ones(2, 4)).sum().backward()
        for _ in range(2):  # a caller that goes on is told again
            try:
                tpcore.optimizer_step(optimizer)
            except ValueError as e:
                told.append(str(e))
    # what only gets no gradient is no replaced parameter
    unused = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = tpcore.Zero1(torch.optim.SGD, unused.named_parameters(), lr=0.1)
    unused[0](torch.ones(2, 4)).sum().backward()
    tpcore.optimizer_step(optimizer)
    return told


def test_fully_shard_after_the_optimizer_is_refused_at_the_first_step(pool: Any) -> None:
    for told in pool.run(Mesh({"dp": 2, "tp": 2}), refused_later):
        assert len(told) == 4
        assert told[0].startswith("parameters '0.weight', '0.bias', '1.weight' of this optimizer got no gradient")
        assert told[2].startswith("parameters 0, 1, 2 of this optimizer got no gradient")
        for text in told:
            assert "fully_shard (FSDP2)" in text
            assert "made after fully_shard" in text


def test_fsdp2_is_refused_with_the_remedy(pool: Any) -> None:
    for told in pool.run(Mesh({"dp": 2, "tp": 2}), refused):
        assert told.keys() == ATTEMPTS.keys()
        for text in told.values():
            assert "is a DTensor: fully_shard (FSDP2)" in text
            assert "tpcore.Zero1" in text
