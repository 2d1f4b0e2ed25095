"""What scripts do beside tpcore's calls: torch_xla's loader and closures, reads; the guide's example."""

from __future__ import annotations

import os
import re
import warnings

import pytest
import torch
from helpers.places import ROOT
from onreplicas import on_replicas

import tpcore
from tpcore.runtime.consensus import gather_bytes
from tpcore.runtime.context import ParallelContext
from tpcore_neuron.testing import programs, run_replicas

GUIDE = ROOT / "docs/neuron.md"


def loader_and_closures(ctx: ParallelContext) -> tuple[list[float], int]:
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    data = [torch.full((2, 4), float(i)) for i in range(4)]
    layer = tpcore.RowParallelLinear(4, 2, bias=False).to(ctx.device)
    torch.nn.init.ones_(layer.weight)
    seen: list[float] = []
    for x in MpDeviceLoader(data, ctx.device):  # marks the step by itself
        loss = layer(x).mean()
        xm.add_step_closure(lambda value: seen.append(value.item()), args=(loss.detach(),))
    ctx.backend.mark_step()
    return seen, len({p.digest for p in programs() if p.collectives})


def test_torch_xlas_loader_and_step_closures():
    for seen, distinct in on_replicas(2, 2, loader_and_closures):
        assert seen == [0.0, 4.0, 8.0, 12.0]
        assert distinct == 1


def reads(ctx: ParallelContext) -> list[str]:
    x = torch.ones(3).to(ctx.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            (x * 2).sum().item()
        gather_bytes(b"a checkpoint does this, between steps", ctx.world)
        y = (x * 3).sum()
        ctx.backend.mark_step()
        y.item()
    return [str(w.message) for w in caught if "cut into two" in str(w.message)]


def test_a_read_inside_a_step_is_told_once_with_its_place():
    told = on_replicas(2, 2, reads, env={"TPCORE_CHECK": "1"})
    (message,) = told[0] + told[1]  # once in a process, which the replicas are
    assert re.match(r"item at .*test_xla_script\.py:\d+ reads a value that is not computed yet", message)


def two_jobs() -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tpcore.init(backend="neuron")
    return "unreachable"


def test_a_process_group_of_another_backend_is_refused():
    with pytest.raises(tpcore.BackendError, match="is initialized with 'gloo', and the neuron backend needs 'xla'"):
        run_replicas(two_jobs, 2)


def too_many() -> None:
    os.environ["WORLD_SIZE"] = "8"
    tpcore.init(backend="neuron")


def test_a_world_that_the_runtime_does_not_connect_is_refused():
    with pytest.raises(tpcore.BackendError, match="8 processes were started and the XLA runtime connects 2"):
        run_replicas(too_many, 2)


def test_the_guides_example():
    (code,) = re.findall(r"```python\n(import torch, tpcore\n.*?)```", GUIDE.read_text(), re.S)
    space: dict = {"__name__": "guide"}
    exec(code, space)
    space["test_step"]()
