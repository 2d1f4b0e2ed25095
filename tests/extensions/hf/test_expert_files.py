"""Files of transformers have each expert by itself: read in parts of a rank's shard, and written from checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import hf
from helpers.pipelines import part_of
from helpers.tiers import tiers
from safetensors.torch import load_file, save_file
from test_experts import FEATURES, MAKES, WHOLE
from torch import Tensor
from transformers import core_model_loading as conversions

import tpcore
from tpcore import Mesh
from tpcore.checkpoint.storage.tensorfile import FileTensor
from tpcore.checkpoint.stored import MemoryShard
from tpcore.testing import run_ranks
from tpcore_hf.load.weights import views

MESHES = {
    "tp 2": ({"tp": 2}, FEATURES),
    "tp 2, experts": ({"tp": 2}, WHOLE),
    "ep 2 x tp 2": ({"dp": 1, "ep": 2, "tp": 2}, FEATURES),
    "ep 2 x tp 2, experts": ({"dp": 1, "ep": 2, "tp": 2}, WHOLE),
}


def taken(mesh: str) -> tuple[dict[str, int], dict[str, Any]]:
    if mesh != "tp 2" and not hf.SPREADS:
        pytest.skip("experts of this transformers take no part of all: parallelize refuses to spread them")
    return MESHES[mesh]  # type: ignore[return-value]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name and the number of entries of each read of a file, from now on."""
    asked: list[tuple[str, int]] = []
    read = FileTensor.read

    def seen(self: FileTensor, starts: Sequence[int], out: Tensor, check: bool) -> None:
        asked.append((self.name, out.numel()))
        read(self, starts, out, check)

    monkeypatch.setattr(FileTensor, "read", seen)
    return asked


@pytest.mark.parametrize(
    ("name", "mesh"),
    tiers(
        [("mixtral", "ep 2 x tp 2"), ("mixtral", "tp 2, experts")],
        slow=[("qwen3_moe", "tp 2, experts"), ("glm4_moe", "ep 2 x tp 2, experts")],
    ),
)
def test_a_model_and_a_checkpoint_become_the_files_that_transformers_writes(
    name: str, mesh: str, tmp_path: Path
) -> None:
    """With each expert by itself."""
    axes, options = taken(mesh)
    torch.manual_seed(0)
    whole = MAKES[name]()
    whole.save_pretrained(tmp_path / "whole")

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = tpcore.parallelize(MAKES[name](), **options)
        with torch.no_grad():
            for key, p in model.named_parameters():
                p.copy_(part_of(whole.get_parameter(key), p, ctx))
        tpcore.checkpoint.save({"model": model.state_dict()}, tmp_path / "c")
        model.save_pretrained(tmp_path / "saved one")
        model.save_pretrained(tmp_path / "saved many", max_shard_size="20KB")

    run_ranks(Mesh(axes), rank)
    for out, more in (("one", []), ("many", ["--max-shard-size", "20KB"])):
        hf.consolidate(tmp_path / "c", tmp_path / out, tmp_path / "whole", *more)
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    matrices = sum(".experts." in key for key in stored)
    assert matrices == sum(p.shape[0] * (2 if "gate_up" in key else 1) for key, p in experts_of(whole).items())
    for folder in ("one", "saved one"):
        made = load_file(tmp_path / folder / "model.safetensors")
        assert stored.keys() == made.keys()
        assert all(torch.equal(t, stored[key]) for key, t in made.items())
    for folder in ("many", "saved many"):
        again = type(whole).from_pretrained(tmp_path / folder)
        assert len(list((tmp_path / folder).glob("*.safetensors"))) > 3
        assert all(torch.equal(t, whole.state_dict()[key]) for key, t in again.state_dict().items())


def experts_of(model: Any) -> dict[str, Tensor]:
    return {key: p for key, p in model.named_parameters() if ".experts." in key}


@pytest.mark.parametrize(
    ("name", "mesh"),
    tiers(product(["mixtral"], MESHES), slow=[("qwen3_moe", "ep 2 x tp 2"), ("glm4_moe", "tp 2, experts")]),
)
def test_a_rank_reads_of_each_expert_what_it_keeps(
    name: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes, options = taken(mesh)
    torch.manual_seed(0)
    whole = MAKES[name]()
    whole.save_pretrained(tmp_path)
    full, one_expert = dict(whole.named_parameters()), whole.config.hidden_size * 64
    asked = watched(monkeypatch)

    def rank(ctx: tpcore.ParallelContext) -> int:
        with tpcore.lazy():
            lazy = type(whole).from_pretrained(tmp_path)
        model: Any = tpcore.parallelize(lazy, **options)
        for key, p in model.named_parameters():
            assert torch.equal(p, part_of(full[key], p, ctx)), key
        return sum(p.numel() for p in experts_of(model).values())

    kept = sum(run_ranks(Mesh(axes), rank))
    of_experts = [n for key, n in asked if ".experts." in key]
    assert sum(of_experts) == kept
    assert max(of_experts) <= one_expert  # no read, and so no buffer, is of more than one matrix of one expert


def transposed(folder: Path) -> Any:
    """Written as the first Qwen3-VL-MoE are: ``[experts, in, out]``, and in memory ``[experts, out, in]``."""
    whole = hf.vision()
    whole.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored |= {key: t.transpose(1, 2).contiguous() for key, t in stored.items() if ".experts." in key}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return whole


@pytest.mark.skipif(not hf.SPREADS, reason="experts of this transformers take no part of all")
def test_what_is_stored_transposed_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = transposed(tmp_path)
    full, largest = dict(whole.named_parameters()), max(p.numel() for p in experts_of(whole).values())
    asked = watched(monkeypatch)

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            lazy = type(whole).from_pretrained(tmp_path)
        rules = {"model.language_model.layers.*.mlp.experts": "moe_tp_experts"}  # transformers' plan has it since 5.23
        model: Any = tpcore.parallelize(lazy, plan=rules, **WHOLE)
        for key, p in model.named_parameters():
            assert torch.equal(p, part_of(full[key], p, ctx)), key

    run_ranks(Mesh({"tp": 2}), rank)
    read = [n for key, n in asked if ".experts." in key]
    assert sum(read) == sum(p.numel() for p in experts_of(whole).values())
    assert max(read) <= largest // 2  # what a rank keeps: a whole tensor is nowhere


def converters() -> dict[str, tuple[Any, list[list[Tensor]], list[tuple[int, ...]]]]:
    """By transformers' operations: a converter, tensors for its sources, and the shapes of its targets."""
    draw = torch.Generator().manual_seed(0)

    def tensors(count: int, *shape: int) -> list[Tensor]:
        return [torch.randn(shape, generator=draw) for _ in range(count)]

    def of(sources: str, targets: str, *operations: Any) -> Any:
        return conversions.WeightConverter(sources.split(), targets.split(), operations=list(operations))

    merge, turns = conversions.MergeModulelist(0), conversions.Interleave(1)
    experts = [tensors(4, 6, 5), tensors(4, 6, 5)]
    ernie = conversions.ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)
    return {
        "stacked": (of("a.*", "x", merge), experts[:1], [(4, 6, 5)]),
        "stacked and joined": (of("a.* b.*", "x", merge, conversions.Concatenate(1)), experts, [(4, 12, 5)]),
        "joined": (of("a b", "x", conversions.Concatenate(0)), [tensors(1, 6, 5), tensors(1, 2, 5)], [(8, 5)]),
        "divided": (of("a", "x y z", conversions.Chunk(0)), [tensors(1, 6, 5)], [(2, 5)] * 3),
        # transformers has it since 5.23
        **(
            {"divided unevenly": (of("a", "x y", conversions.Split(1)), [tensors(1, 6, 5)], [(6, 3), (6, 2)])}
            if hasattr(conversions, "Split")
            else {}
        ),
        "transposed": (of("a", "x", conversions.Transpose(1, 2)), [tensors(1, 4, 6, 5)], [(4, 5, 6)]),
        "as it should be": (of("a", "x", conversions.Transpose(1, 2, True)), [tensors(1, 4, 6, 5)], [(4, 6, 5)]),
        "in turns": (of("a", "x", turns), [tensors(1, 4, 6, 5)], [(4, 6, 5)]),
        "rows in turns": (of("a", "x", conversions.Interleave(0)), [tensors(1, 6, 5)], [(6, 5)]),
        "in turns and divided": (of("a", "x y", turns, conversions.Chunk(1)), [tensors(1, 4, 6, 5)], [(4, 3, 5)] * 2),
        "two kinds of experts": (of("a.* b.*", "x y", ernie), experts, [(2, 12, 5)] * 2),
    }


@pytest.mark.parametrize("name", converters())
def test_a_part_of_a_view_is_that_part_of_what_transformers_makes(name: str) -> None:
    converter, sources, shapes = converters()[name]
    entries: list[int] = []

    class Counted(MemoryShard):
        def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
            entries.append(out.numel())
            super().read(starts, out, check)

    found = views(converter, [[Counted(t) for t in group] for group in sources], shapes)
    assert found is not None
    targets = dict(zip(converter.target_patterns, shapes, strict=True))
    like: Any = SimpleNamespace(get_parameter=lambda key: torch.empty(targets[key], device="meta"))
    made: Any = dict(zip(converter.source_patterns, [list(group) for group in sources], strict=True))
    for op in converter.operations:
        of = {"source_patterns": converter.source_patterns, "target_patterns": converter.target_patterns}
        made = op.convert(made, **of, model=like, config=None, full_layer_name=converter.target_patterns[0])
    draw = random.Random(0)
    for view, pattern, shape in zip(found, converter.target_patterns, shapes, strict=True):
        want = made[pattern]
        want = want[0] if isinstance(want, list) else want
        assert (view.shape, view.dtype) == (want.shape, want.dtype) == (shape, torch.float32)
        for _ in range(50):
            ends = [sorted(draw.sample(range(n + 1), 2)) for n in shape]
            out = torch.full([high - low for low, high in ends], torch.nan)
            view.read([low for low, _ in ends], out, False)
            assert torch.equal(out, want[tuple(slice(*one) for one in ends)])
            assert sum(entries) <= out.numel() * (2 if "turns" in name else 1)  # what lies between is read and left
            entries.clear()


def test_what_no_view_is_of_is_made_whole() -> None:
    converter, sources, shapes = converters()["stacked and joined"]
    shards: Any = [[MemoryShard(t) for t in group] for group in sources]
    assert views(converter, shards, [(4, 12, 4)]) is None
    assert views(converter, [shards[0][:-1], shards[1]], shapes) is None
    assert views(converter, [shards[0], []], shapes) is None
    other = conversions.WeightConverter(["a"], ["x"], operations=[conversions.Conv3dToLinear(2, (2, 2, 2))])
    assert views(other, [shards[0][:1]], [(6, 5)]) is None
