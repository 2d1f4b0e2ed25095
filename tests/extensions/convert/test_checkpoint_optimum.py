"""What optimum-neuron wrote of several stages opens on any mesh, under the names of the original model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import values
from helpers.hf import part
from safetensors.torch import load_file
from torch import Tensor, nn

import tpcore
from tpcore import CheckpointError, Mesh, ParallelContext
from tpcore.checkpoint import load
from tpcore.testing import run_ranks
from tpcore_convert.inspect import inspect
from tpcore_convert.rewrite import consolidate, convert

pytestmark = pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")
TP, PP, LAYERS, WIDTH, VOCAB = 4, 2, 4, 5, 8
METADATA = "mp_metadata_pp_rank_{}"
HEADS, KV, SIZE = 8, 2, 3  # query and kv heads, entries of each
ORDER = [0, 1, 4, 5, 2, 3, 6, 7]  # of the query heads over four ranks with two copies of each kv head
ATTENTION = {
    "gqa_qkv_projection_name": "qkv_proj",
    "query_projection_name": "q_proj",
    "key_projection_name": "k_proj",
    "value_projection_name": "v_proj",
    "output_projection_name": "o_proj",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "kv_size_multiplier": 2,
    "q_output_size_per_partition": HEADS * SIZE // 4,
    "kv_output_size_per_partition": 2 * KV * SIZE // 4,
    "bias": True,
    "tp_size": 4,
    "peft_type": None,
}
MLP = {"fused_linear_name": "gate_up", "linear_names": ["gate", "up"], "fuse_axis": 0, "original_dims": [8, 8]}


def whole() -> dict[str, Tensor]:
    """The original model: its head is its table."""
    g = torch.Generator().manual_seed(0)
    made = {"embed.weight": torch.randn(VOCAB, WIDTH, generator=g)}
    for i in range(LAYERS):
        for name, heads in (("q_proj", HEADS), ("k_proj", KV), ("v_proj", KV)):
            made[f"layers.{i}.a.{name}.weight"] = torch.randn(heads * SIZE, WIDTH, generator=g)
            made[f"layers.{i}.a.{name}.bias"] = torch.randn(heads * SIZE, generator=g)
        made[f"layers.{i}.a.o_proj.weight"] = torch.randn(WIDTH, HEADS * SIZE, generator=g)
        made |= {f"layers.{i}.mlp.{n}.weight": torch.randn(8, WIDTH, generator=g) for n in ("gate", "up")}
    return made | {"norm.weight": torch.randn(WIDTH, generator=g), "head.weight": made["embed.weight"]}


def of_layer(full: dict[str, Tensor], i: int, rank: int, *, fuse_qkv: bool, fuse_mlp: bool) -> dict[str, Tensor]:
    """Rank ``rank``'s shards of a layer: q and o with the heads in optimum's order, k and v copied."""
    a, mlp = f"layers.{i}.a", f"layers.{i}.mlp"
    mine, shard = ORDER[2 * rank : 2 * rank + 2], {}
    for end in ("weight", "bias"):
        q = torch.cat([full[f"{a}.q_proj.{end}"].split(SIZE)[head] for head in mine])
        k, v = (full[f"{a}.{n}_proj.{end}"].split(SIZE)[rank % KV] for n in "kv")
        if fuse_qkv:
            shard[f"{a}.qkv_proj.{end}_qkv"] = torch.cat([q, k, v])
        else:
            shard |= {f"{a}.qkv_proj.{end}_{n}": t.clone() for n, t in (("q", q), ("k", k), ("v", v))}
    o = full[f"{a}.o_proj.weight"].split(SIZE, 1)
    shard[f"{a}.o_proj.weight"] = torch.cat([o[head] for head in mine], 1)
    gate, up = (full[f"{mlp}.{n}.weight"].chunk(TP)[rank].clone() for n in ("gate", "up"))
    if fuse_mlp:
        return shard | {f"{mlp}.gate_up.weight": torch.cat([gate, up])}
    return shard | {f"{mlp}.gate.weight": gate, f"{mlp}.up.weight": up}


def stage_of(name: str) -> int:
    """The table is on the first stage, norm and head are on the last."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) * PP // LAYERS
    return 0 if name.startswith("embed") else PP - 1


def dim_of(name: str) -> int | None:
    return None if name.startswith("norm") else 1 if "o_proj" in name else 0


def write(path: Path, version: str, *, fuse_qkv: bool) -> dict[str, Tensor]:
    """As optimum-neuron does at tp=4, pp=2. ``new``: JSON of each stage's own parameters, and all names of
    the model in every file, those of other stages without values. ``old``: a pickle of all parameters."""
    full, new = whole(), version == "new"
    folder = path / "shards" / "model"
    folder.mkdir(parents=True)
    options = {"fuse_qkv": fuse_qkv, "fuse_mlp": new}
    for rank in range(TP):
        table = full["embed.weight"].chunk(TP)[rank].clone()
        every = {"embed.weight": table, "norm.weight": full["norm.weight"], "head.weight": table}
        for i in range(LAYERS):
            every |= of_layer(full, i, rank, **options)
        every["steps"] = torch.tensor(3)  # a buffer, which is no parameter
        for stage in range(PP):
            own = {name: t for name, t in every.items() if stage_of(name) == stage}
            others = {name: t.to("meta") for name, t in every.items() if stage_of(name) != stage}
            file = folder / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            torch.save({**own, **others} if new else own, file)
    # a tied parameter is named once
    named = [name for name in every if name not in ("head.weight", "steps")]
    for stage in range(PP):
        place = path / "shards" / METADATA.format(stage)
        if new:
            mine = [name for name in named if stage_of(name) == stage]
            layers = range(stage * LAYERS // PP, (stage + 1) * LAYERS // PP)
            place.with_suffix(".json").write_text(json.dumps(new_metadata(mine, layers, fuse_qkv)))
        else:
            torch.save(old_metadata(named, fuse_qkv), place.with_suffix(".pt"))
    return full


def new_metadata(names: list[str], layers: range, fuse_qkv: bool) -> dict[str, Any]:
    parameters = {
        name: {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1, "num_partitions": TP}
        if (dim := dim_of(name)) is not None
        else {"tensor_model_parallel": False}
        for name in names
    }
    made = []
    for i in range(LAYERS):  # a module of another stage is listed without specs
        attention = ["GQAQKVColumnParallelLinearSpec", {**ATTENTION, "fuse_qkv": fuse_qkv}]
        fused = ["FusedLinearsSpec", {**MLP, "bias": False, "tp_size": TP, "peft_type": None}]
        for module, spec in (("a", attention), ("mlp", fused)):
            specs = [spec] if i in layers else []
            made.append({"module_fully_qualified_name": f"layers.{i}.{module}", "specs": specs})
    return {"parameters": parameters, "model_weight_transformation_specs": made}


def old_metadata(names: list[str], fuse_qkv: bool) -> dict[str, Any]:
    sharded = {
        name: {"kind": "tied" if (dim := dim_of(name)) is None else "sharded", "partition_dim": dim} for name in names
    }
    stored = {
        f"layers.{i}.a.{n}_proj.{end}": f"layers.{i}.a.qkv_proj.{end}_{'qkv' if fuse_qkv else n}"
        for i in range(LAYERS)
        for end in ("weight", "bias")
        for n in "qkv"
    }
    heads = {n: ATTENTION[n] for n in ("num_attention_heads", "num_key_value_heads", "kv_size_multiplier")}
    outputs = {f"layers.{i}.a.o_proj.weight" for i in range(LAYERS)}
    gqa = {"original_names_to_gqa_qkv_names": stored, "output_projections_names": outputs, **heads}
    return {"sharded_metadata": sharded, "gqa_qkv_metadata": gqa}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.mlp = nn.Module(), nn.Module()
        column = tpcore.ColumnParallelLinear
        for name, heads in (("q_proj", HEADS), ("k_proj", KV), ("v_proj", KV)):
            self.a.register_module(name, column(WIDTH, heads * SIZE, gather_output=False))
        self.a.o_proj = tpcore.RowParallelLinear(HEADS * SIZE, WIDTH, bias=False, input_is_parallel=True)
        self.mlp.gate, self.mlp.up = (column(WIDTH, 8, bias=False, gather_output=False) for _ in range(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ends: dict[str, Any] = {"group": tpcore.current().comm("pp", "tp")}
        self.embed = tpcore.ParallelEmbedding(VOCAB, WIDTH, **ends)
        self.layers = tpcore.PipelinedLayers([Layer() for _ in range(LAYERS)], 2)
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = tpcore.ColumnParallelLinear(WIDTH, VOCAB, bias=False, **ends)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))


CASES = [("new", False), ("new", True), ("old", True)]


@pytest.mark.parametrize(("version", "fuse_qkv"), CASES)
def test_into_a_model_on_any_mesh(version: str, fuse_qkv: bool, tmp_path: Path) -> None:
    full = write(tmp_path, version, fuse_qkv=fuse_qkv)

    def read(ctx: ParallelContext) -> None:
        model = Model()
        for p in model.parameters():
            nn.init.zeros_(p)
        assert load(tmp_path, model) == {}
        assert model.steps == 3
        for name, value in model.named_parameters(remove_duplicate=False):
            assert torch.equal(value, part(full[name], value)), name

    for pp, tp in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1)):
        run_ranks(Mesh({"pp": pp, "dp": 1, "tp": tp}), read)


@pytest.mark.parametrize(("version", "fuse_qkv"), CASES)
def test_on_the_command_line(version: str, fuse_qkv: bool, tmp_path: Path) -> None:
    full = write(tmp_path / "c", version, fuse_qkv=fuse_qkv)
    want = {**full, "steps": torch.tensor(3)}
    assert inspect(tmp_path / "c").tp == TP
    convert(tmp_path / "c", tmp_path / "ours")
    for place in (tmp_path / "c", tmp_path / "ours"):
        found = values(place)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], t) for name, t in want.items())
    consolidate(tmp_path / "c", tmp_path / "whole")
    got = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(got[name], t) for name, t in full.items() if name in got)
    assert full.keys() - got.keys() <= {"head.weight"}  # tied


def test_what_is_wrong_with_the_metadata_of_a_stage(tmp_path: Path) -> None:
    write(tmp_path / "a", "new", fuse_qkv=False)
    (tmp_path / "a" / "shards" / METADATA.format(1)).with_suffix(".json").unlink()
    with pytest.raises(CheckpointError, match=r"mp_metadata_pp_rank_1\.json is missing, and that of another"):
        inspect(tmp_path / "a")
    write(tmp_path / "b", "old", fuse_qkv=False)
    bad = old_metadata(["embed.weight"], False)
    bad["gqa_qkv_metadata"]["output_projections_names"] = set()
    torch.save(bad, (tmp_path / "b" / "shards" / METADATA.format(0)).with_suffix(".pt"))
    with pytest.raises(CheckpointError, match=r"mp_metadata_pp_rank_0\.pt is damaged: KeyError"):
        inspect(tmp_path / "b")


@pytest.mark.parametrize(
    ("was", "made", "message"),
    [
        ('"peft_type": null', '"peft_type": "lora"', r"pp_rank_0\.json is of adapters of the kind 'lora'"),
        ('"num_key_value_heads": 2', '"num_key_value_heads": 0', "are not as their metadata say"),
        ("[8, 8]", "[8, 9000]", "are not as their metadata say"),
        ('"o_proj"', '"out"', r"pp_rank_00\.pt has no 'layers\.0\.a\.out\.weight', which its metadata name"),
    ],
)
def test_metadata_that_are_refused(was: str, made: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "c", "new", fuse_qkv=False)
    path = tmp_path / "c" / "shards" / "mp_metadata_pp_rank_0.json"
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, made))
    with pytest.raises(CheckpointError, match=message):
        inspect(tmp_path / "c")
