"""Checkpoints of ranks that are processes, over gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from rank_pool import RankPool

import tpcore
from tpcore.checkpoint import load, save
from tpcore.checkpoint.tensors import stored
from tpcore.checkpoint.write import save as writing
from tpcore.errors import PeerLostError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext

MESH = Mesh({"dp": 2, "tp": 2})


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return tpcore.ColumnParallelLinear(6, 8)


def _save(ctx: ParallelContext, path: str, seed: int) -> None:
    model = _model(seed)
    optimizer = torch.optim.Adam(model.named_parameters())
    for p in model.parameters():
        p.grad = p.detach() * 2
    optimizer.step()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seed": seed}, path)


def _load(ctx: ParallelContext, path: str) -> tuple[int, torch.Tensor, torch.Tensor]:
    model = _model(100)
    rest = load(path, model)
    moment = rest["optimizer"]["state"][0]["exp_avg"]
    return (rest["seed"], ctx.comm("tp").all_gather(model.weight.detach(), 0), ctx.comm("tp").all_gather(moment, 0))


def _check(results: list[Any], seed: int) -> None:
    for found, weight, moment in results:
        assert found == seed
        assert torch.equal(weight, results[0][1])
        assert torch.equal(moment, results[0][2])


def test_round_trip(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    pool.run(MESH, _save, path, 5)
    first = pool.run(MESH, _load, path)
    _check(first, 5)
    for axes in ({"tp": 1}, {"tp": 4}):
        again = pool.run(Mesh(axes), _load, path)
        _check([*again, first[0]], 5)


def _save_and_die(ctx: ParallelContext, path: str) -> None:
    if ctx.rank == 0:
        writing.write_tensors = lambda *args: os._exit(7)  # type: ignore[attr-defined]
    _save(ctx, path, 6)


def test_a_rank_dies_in_a_save(pool: RankPool, tmp_path: Path) -> None:
    """The others hear of it, the previous checkpoint is whole, and the next save clears up."""
    path = str(tmp_path / "c")
    pool.run(MESH, _save, path, 5)
    for outcome in pool.outcomes(MESH, _save_and_die, path):
        assert isinstance(outcome.error, PeerLostError)  # and not CollectiveTimeoutError
    _check(pool.run(MESH, _load, path), 5)
    pool.run(MESH, _save, path, 7)
    _check(pool.run(MESH, _load, path), 7)
    assert os.listdir(tmp_path) == ["c"]


def _load_and_die(ctx: ParallelContext, path: str) -> None:
    if ctx.rank == 3:
        stored.ReadPlan.fill = lambda self, *_, **__: os._exit(7)  # type: ignore[method-assign]
    _load(ctx, path)


def test_a_rank_dies_in_a_load(pool: RankPool, tmp_path: Path) -> None:
    pool.run(MESH, _save, str(tmp_path / "c"), 5)
    for outcome in pool.outcomes(MESH, _load_and_die, str(tmp_path / "c")):
        assert isinstance(outcome.error, PeerLostError)
