"""torch's own tools around cut models: DistributedDataParallel, DTensors, distributed checkpoints, FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

pytestmark = pytest.mark.processes


def _wrap(ctx: ParallelContext) -> None:
    torch.manual_seed(0)
    cut = nn.Sequential(tpcore.ColumnParallelLinear(4, 8, gather_output=False), nn.LayerNorm(4))
    before = cut[0].weight.detach().clone()
    for group in (None, ctx.comm("tp").process_group):
        with pytest.raises(ValueError, match=r"hold different parts of '0\.weight'.*comm\('dp'\)"):
            DistributedDataParallel(cut, process_group=group)
    torch.testing.assert_close(cut[0].weight, before, rtol=0, atol=0)

    DistributedDataParallel(cut, process_group=ctx.comm("dp").process_group)
    DistributedDataParallel(nn.Linear(2, 2))  # nothing of it is sharded


def _wrap_copies(ctx: ParallelContext) -> None:
    """Key heads that two ranks hold are alike in these two, and in no others."""
    torch.manual_seed(0)
    block = tpcore.Block(4, 2, replicate=True)
    keys = tpcore.ColumnParallelLinear(4, 4, gather_output=False, blocks=[block])
    DistributedDataParallel(keys, process_group=ctx.comm("tp", within=2).process_group)
    with pytest.raises(ValueError, match=r"rank \d has another part than rank"):
        DistributedDataParallel(keys, process_group=ctx.comm("tp").process_group)


def test_torchs_data_parallelism_takes_no_shards_for_replicas(pool: RankPool) -> None:
    pool.run(Mesh({"dp": 2, "tp": 2}), _wrap)
    pool.run(Mesh({"dp": 1, "tp": 4}), _wrap_copies)


class Model(nn.Module):
    """Every kind of cut: padded, fused, heads that ranks share, tied, and what is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        heads = tpcore.Block(8, 2), tpcore.Block(4, 2, replicate=True), tpcore.Block(4, 2, replicate=True)
        self.embed = tpcore.ParallelEmbedding(10, 4, pad=True)
        self.qkv = tpcore.ColumnParallelLinear(4, 16, gather_output=False, blocks=heads)
        self.out = tpcore.RowParallelLinear(8, 4, input_is_parallel=True)
        self.gate = tpcore.ColumnParallelLinear(4, 16, gather_output=False, blocks=2)
        self.norm = nn.BatchNorm1d(4)
        self.head = tpcore.ColumnParallelLinear(4, 10, bias=False, gather_output=False, pad=True)
        self.head.weight = self.embed.weight


def _model(seed: int) -> Model:
    tpcore.random.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        model.norm.running_mean.add_(seed)
    return model


def _save(ctx: ParallelContext, path: str) -> None:
    state = tpcore.checkpoint.dtensor_state_dict(_model(1))
    assert [name for name in state if name.startswith("gate.w")] == ["gate.weight.0", "gate.weight.1"]
    assert state["embed.weight"].full_tensor().shape == (10, 4)
    dcp.save(state, checkpoint_id=path)


def _load(ctx: ParallelContext, path: str) -> None:
    model, want = _model(2), _model(1)
    assert not torch.equal(model.out.weight, want.out.weight)
    dcp.load(tpcore.checkpoint.dtensor_state_dict(model), checkpoint_id=path)
    for name, value in want.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_a_model_saved_by_torch_at_one_degree_is_loaded_by_torch_at_another(pool: RankPool, tmp_path: Path) -> None:
    pool.run(Mesh({"dp": 2, "tp": 2}), _save, str(tmp_path / "dcp"))
    pool.run(Mesh({"dp": 1, "tp": 4}), _load, str(tmp_path / "dcp"))


def _cannot_say(ctx: ParallelContext) -> None:
    heads = tpcore.ColumnParallelLinear(4, 18, blocks=[tpcore.Block(18, 3)], pad=True)
    with pytest.raises(ValueError, match=r"'weight' is sharded by units of 3 and padded at tp=4"):
        tpcore.checkpoint.dtensor_state_dict(heads)


def test_an_optimizer_is_sent_to_the_checkpoints_of_tpcore() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match=r"takes a module, not SGD.* use tpcore\.checkpoint\.save"):
        tpcore.checkpoint.dtensor_state_dict(optimizer)  # type: ignore[arg-type]


def test_what_no_dtensor_can_say_is_refused(pool: RankPool) -> None:
    pool.run(Mesh({"dp": 1, "tp": 4}), _cannot_say)
    with pytest.raises(tpcore.BackendError, match="ThreadBackend is none"):
        run_ranks(Mesh({"tp": 1}), lambda ctx: tpcore.checkpoint.dtensor_state_dict(nn.Linear(2, 2)))


# -- FSDP2 is refused before anything is reduced, on all ranks alike --------------------------------------------
FSDP = pytest.mark.skipif(
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


@FSDP
def test_fully_shard_after_the_optimizer_is_refused_at_the_first_step(pool: RankPool) -> None:
    for told in pool.run(Mesh({"dp": 2, "tp": 2}), refused_later):
        assert len(told) == 4
        assert told[0].startswith("parameters '0.weight', '0.bias', '1.weight' of this optimizer got no gradient")
        assert told[2].startswith("parameters 0, 1, 2 of this optimizer got no gradient")
        for text in told:
            assert "fully_shard (FSDP2)" in text
            assert "made after fully_shard" in text


@FSDP
def test_fsdp2_is_refused_with_the_remedy(pool: RankPool) -> None:
    for told in pool.run(Mesh({"dp": 2, "tp": 2}), refused):
        assert told.keys() == ATTEMPTS.keys()
        for text in told.values():
            assert "is a DTensor: fully_shard (FSDP2)" in text
            assert "tpcore.Zero1" in text
