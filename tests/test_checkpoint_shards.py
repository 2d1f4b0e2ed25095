"""One rank's shards as a plain dict, from every kind of source, without ranks or a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tpcore.checkpoint.offline.consolidate import consolidate
from tpcore.checkpoint.offline.reshard import reshard
from tpcore.checkpoint.read.source import CutRule, read_shards
from tpcore.errors import CheckpointError
from tpcore.layout.shard import Block, ShardSpec

pytestmark = [pytest.mark.usefixtures("no_fsync"), pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")]

SPECS = {
    "up.weight": ShardSpec((6, 4), 0),
    "gate_up.weight": ShardSpec.strided((8, 4), 0, 2),
    "down.weight": ShardSpec((4, 6), 1),
    "kv.weight": ShardSpec((2, 4), 0, (Block(2, 2, True),)),
    "norm.weight": ShardSpec((4,)),
}
RULES = [CutRule("up.*", 0), CutRule("gate_up.*", 0, 2), CutRule("down.*", 1)]
KINDS = ["memory", "nested", ".safetensors", ".pt", "hf", "ours 1", "ours 2", "ours 3", "foreign"]


def full() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=g) for name, spec in SPECS.items()}


def source(kind: str, home: Path) -> Path | Mapping[str, Any]:
    values, file = full(), home / "whole.safetensors"
    if kind in ("memory", "nested"):
        return values if kind == "memory" else {"model": values, "epoch": 3}
    if kind == ".pt":
        torch.save({"model": values, "epoch": 3}, home / "whole.pt")
        return home / "whole.pt"
    if kind == "foreign":
        for rank in range(2):
            (home / f"tp_rank_{rank}").mkdir()
            state = {name: SPECS[name].shard(t, rank, 2) for name, t in values.items()}
            torch.save({"model": state}, home / f"tp_rank_{rank}" / "checkpoint.pt")
        return home
    save_file(values, file)
    if kind == "hf":
        consolidate(file, home / "hf", max_shard_size=150)
        return home / "hf"
    if kind.startswith("ours"):
        reshard(file, home / "c", int(kind[-1]), rules=RULES)
        return home / "c"
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_any_source(kind: str, tmp_path: Path) -> None:
    """Also at the degree of the source, where a rank has a shard of its own."""
    there = source(kind, tmp_path)
    for n in (1, 2, 4):
        for rank in range(n):
            wanted = {name: (spec, torch.float32) for name, spec in SPECS.items()}
            found = read_shards(there, wanted, rank, n)
            assert list(found) == list(wanted)
            for name, t in full().items():
                assert torch.equal(found[name], SPECS[name].shard(t, rank, n)), (name, rank, n)
                assert found[name].is_contiguous()


def test_floats_are_converted_and_memory_is_its_own(tmp_path: Path) -> None:
    values = full()
    wanted = {name: (spec, torch.bfloat16) for name, spec in SPECS.items()}
    found = read_shards(values, wanted, 0, 1)
    assert torch.equal(found["up.weight"], values["up.weight"].bfloat16())
    wanted["norm.weight"] = SPECS["norm.weight"], torch.float32
    found = read_shards(values, wanted, 0, 1)
    found["norm.weight"].zero_()
    assert torch.equal(values["norm.weight"], full()["norm.weight"])


def test_other_names(tmp_path: Path) -> None:
    """A prefix that one side lacks, and a tied weight that is stored under another of its names."""
    save_file({f"bert.{name}": t for name, t in full().items()}, tmp_path / "w.safetensors")
    wanted = {name: (spec, torch.float32) for name, spec in SPECS.items()}
    assert torch.equal(read_shards(tmp_path / "w.safetensors", wanted, 0, 1)["up.weight"], full()["up.weight"])
    values = full()
    values["head.weight"] = values.pop("up.weight")
    found = read_shards(values, wanted, 1, 2, ties={"head.weight": "up.weight"})
    assert torch.equal(found["up.weight"], values["head.weight"][3:])
    both = {**full(), "head.weight": full()["up.weight"]}
    assert read_shards(both, wanted, 1, 2, ties={"head.weight": "up.weight"}).keys() == wanted.keys()
    with pytest.raises(CheckpointError, match=r"'up.weight' and 'head.weight' are one tensor in the model"):
        read_shards({**full(), "head.weight": torch.ones(6, 4)}, wanted, 1, 2, ties={"head.weight": "up.weight"})


def test_what_does_not_fit(tmp_path: Path) -> None:
    wanted = {name: (spec, torch.float32) for name, spec in SPECS.items()}
    values = full()
    values["norm.weight"] = torch.ones(5)
    values["up.weight"] = torch.ones(6, 4, dtype=torch.int64)
    values["more"] = values.pop("down.weight")
    save_file(values, tmp_path / "w.safetensors")
    for there in (values, tmp_path / "w.safetensors"):
        with pytest.raises(CheckpointError) as caught:
            read_shards(there, wanted, 0, 2)
        assert str(caught.value).splitlines()[1:] == [
            "  'up.weight': the checkpoint has dtype torch.int64, the model torch.float32",
            "  'down.weight': the model has shape (4, 6), the checkpoint nothing",
            "  'norm.weight': the checkpoint has shape (5,), the model (4,)",
            "  'more': the checkpoint has it, the model not",
        ]
    with pytest.raises(CheckpointError, match="does not exist"):
        read_shards(tmp_path / "none", wanted, 0, 2)
