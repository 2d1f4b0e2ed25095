"""A form of checkpoint is one module and its line in the registry: here one .npz for each rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tpcore
from tpcore.checkpoint.forms import registry
from tpcore.checkpoint.forms.rank_files import RankFiles
from tpcore.checkpoint.forms.source import Form, Reading, Source
from tpcore.checkpoint.inspect import diff, inspect, verify
from tpcore.checkpoint.read.source import CutRule, read_shards
from tpcore.checkpoint.rewrite import consolidate, convert, reshard
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

RULES = [CutRule("up.*", 0), CutRule("down.weight", 1)]
_RANK = re.compile(r"shard_(\d+)\.npz")


# -- the form: all that a reader of such files has to write -------------------------------------------------
class Npz(RankFiles):
    form = "npz shards"

    def read(self, file: str) -> tuple[Mapping[str, Any], dict[Any, Any]]:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}, {}
        except Exception as e:
            raise CheckpointError(f"{file} is damaged: {type(e).__name__}: {e}") from e


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    names = os.listdir(path) if os.path.isdir(path) else []
    files = {int(m[1]): os.path.join(path, m[0]) for m in map(_RANK.fullmatch, names) if m}
    if not files:
        return None
    if missing := sorted(set(range(max(files) + 1)) - files.keys()):
        raise CheckpointError(f"{path} holds {len(files)} .npz shards, but not that of rank {missing[0]}")
    return Npz(path, [[files[rank] for rank in sorted(files)]], how)


FORM = Form(sharded=True, open=_open)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORMS", (FORM, *registry.FORMS))


# -- what follows from it -----------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = tpcore.ColumnParallelLinear(4, 8, gather_output=False)
        self.down = tpcore.RowParallelLinear(8, 4, input_is_parallel=True)


def full() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (8, 4), "up.bias": (8,), "down.weight": (4, 8), "down.bias": (4,)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "npz"
    folder.mkdir()
    for rank in range(2):
        state = {k: v.chunk(2, 1 if k == "down.weight" else 0)[rank] for k, v in full().items()}
        state["down.bias"] = full()["down.bias"]
        np.savez(folder / f"shard_{rank:03d}.npz", **{k: v.numpy() for k, v in state.items()})
    return folder


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_into_a_model_at_any_degree(tp: int, shards: Path) -> None:
    def rank(ctx: ParallelContext) -> None:
        net = Net()
        assert tpcore.checkpoint.load(shards, net) == {}
        specs = tpcore.layers.shard_specs(net)
        wanted = {name: (spec, torch.float32) for name, spec in specs.items()}
        by_name = read_shards(shards, wanted, ctx.coord("tp"), tp)
        for name, spec in specs.items():
            want = spec.shard(full()[name], ctx.coord("tp"), tp)
            assert torch.equal(net.state_dict()[name], want)
            assert torch.equal(by_name[name], want)

    run_ranks(Mesh({"tp": tp}), rank)


def test_every_command(shards: Path, tmp_path: Path) -> None:
    assert inspect(shards, rules=RULES).form == "npz shards"
    assert verify(shards, rules=RULES) == []
    reshard(shards, tmp_path / "four", 4, rules=RULES)
    assert list(diff(shards, tmp_path / "four", rules=RULES)) == []
    convert(shards, tmp_path / "two", rules=RULES)
    assert inspect(tmp_path / "two").tp == 2
    for source in ("four", "two"):
        consolidate(tmp_path / source, tmp_path / f"{source} whole")
        got = load_file(tmp_path / f"{source} whole" / "model.safetensors")
        assert all(torch.equal(got[k], v) for k, v in full().items())


def test_errors(shards: Path) -> None:
    (shards / "shard_000.npz").write_bytes(b"PK no")
    with pytest.raises(CheckpointError, match="damaged"):
        inspect(shards, rules=RULES)
    (shards / "shard_000.npz").unlink()
    with pytest.raises(CheckpointError, match="not that of rank 0"):
        inspect(shards, rules=RULES)
