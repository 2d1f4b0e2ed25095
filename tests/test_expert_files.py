"""Files of transformers have each expert by itself: read in parts of a rank's shard, and written from checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import part_of
from safetensors.torch import load_file
from test_experts import FEATURES, MAKES, WHOLE
from tiers import tiers
from torch import Tensor
from typer.testing import CliRunner

import tpcore
from tpcore import Mesh
from tpcore.checkpoint.storage.tensorfile import FileTensor
from tpcore.cli.app import app
from tpcore.testing import run_ranks

MESHES = {
    "tp 2": ({"tp": 2}, FEATURES),
    "tp 2, experts": ({"tp": 2}, WHOLE),
    "ep 2 x tp 2": ({"dp": 1, "ep": 2, "tp": 2}, FEATURES),
    "ep 2 x tp 2, experts": ({"dp": 1, "ep": 2, "tp": 2}, WHOLE),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", tiers(["mixtral"], slow=["qwen3_moe", "glm4_moe"]))
def test_a_rank_reads_of_each_expert_what_it_keeps(
    name: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes, options = MESHES[mesh]
    torch.manual_seed(0)
    whole = MAKES[name]()
    whole.save_pretrained(tmp_path)
    full, one_expert = dict(whole.named_parameters()), whole.config.hidden_size * 64
    asked: list[tuple[str, int]] = []
    read = FileTensor.read

    def seen(self: FileTensor, starts: Sequence[int], out: Tensor, check: bool) -> None:
        asked.append((self.name, out.numel()))
        read(self, starts, out, check)

    monkeypatch.setattr(FileTensor, "read", seen)

    def rank(ctx: tpcore.ParallelContext) -> int:
        with tpcore.lazy():
            lazy = type(whole).from_pretrained(tmp_path)
        model: Any = tpcore.parallelize(lazy, **options)
        for key, p in model.named_parameters():
            assert torch.equal(p, part_of(full[key], p, ctx)), key
        return sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)

    kept = sum(run_ranks(Mesh(axes), rank))
    of_experts = [n for key, n in asked if ".experts." in key]
    assert sum(of_experts) == kept
    assert max(of_experts) <= one_expert  # no read, and so no buffer, is of more than one matrix of one expert


@pytest.mark.parametrize("mesh", tiers(["ep 2 x tp 2"], slow=["tp 2, experts", "ep 2 x tp 2, experts"]))
@pytest.mark.parametrize("name", tiers(["mixtral"], slow=["qwen3_moe", "glm4_moe"]))
def test_a_checkpoint_becomes_the_files_that_transformers_writes(name: str, mesh: str, tmp_path: Path) -> None:
    axes, options = MESHES[mesh]
    torch.manual_seed(0)
    whole = MAKES[name]()
    whole.save_pretrained(tmp_path / "whole")

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = tpcore.parallelize(MAKES[name](), **options)
        with torch.no_grad():
            for key, p in model.named_parameters():
                p.copy_(part_of(whole.get_parameter(key), p, ctx))
        tpcore.checkpoint.save({"model": model.state_dict()}, tmp_path / "c")

    run_ranks(Mesh(axes), rank)
    for out, more in (("one", []), ("many", ["--max-shard-size", "20KB"])):
        given = ["checkpoint", "consolidate", str(tmp_path / "c"), str(tmp_path / out)]
        said = CliRunner().invoke(app, [*given, "--config", str(tmp_path / "whole"), *more])
        assert said.exit_code == 0, said.output
    stored, made = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "one"))
    assert stored.keys() == made.keys()
    assert all(torch.equal(t, stored[key]) for key, t in made.items())
    again = type(whole).from_pretrained(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert all(torch.equal(t, whole.state_dict()[key]) for key, t in again.state_dict().items())
