"""Files of Megatron-LM, written here as it writes them, load into sharded Llamas at any degree."""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections.abc import Iterator
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hf
from safetensors.torch import load_file
from torch import Tensor, nn

import tpcore
from tpcore import CheckpointError, Mesh, ParallelContext
from tpcore.checkpoint import load
from tpcore.testing import run_ranks
from tpcore_convert.inspect import inspect
from tpcore_convert.rewrite import consolidate, convert

pytestmark = pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")
LAYERS, HEADS, KV = 3, 4, 2


@pytest.fixture
def enum() -> Iterator[Enum]:
    """An enum of Megatron's, as ``args`` holds them; its module is gone again before anything is read."""
    modules = {name: types.ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.enums")}
    kind = Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.core.enums")
    modules["megatron.core.enums"].ModelType = kind  # type: ignore[attr-defined]
    sys.modules.update(modules)
    yield kind["encoder_or_decoder"]
    for name in modules:
        sys.modules.pop(name, None)


def model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "num_key_value_heads": KV, "attention_bias": True, "vocab_size": 100}
    return hf.llama(**{**sizes, **options}).double()


def fused(full: dict[str, Tensor], layer: str, end: str, tp_rank: int, tp: int, version: float) -> Tensor:
    """q, k and v of a rank: by kv head since version 2, one after the other before 1."""
    by_group = [full[f"{layer}self_attn.{n}_proj.{end}"].unflatten(0, (KV, -1)) for n in "qkv"]
    own = [t.chunk(tp)[tp_rank] for t in by_group]
    return torch.cat(own, 1).flatten(0, 1) if version >= 2 else torch.cat([t.flatten(0, 1) for t in own])


def layer_of(full: dict[str, Tensor], n: int, i: int, rank: tuple[int, int], version: float) -> dict[str, Any]:
    """Layer ``n`` of the model as layer ``i`` of its stage."""
    (t, tp), theirs, ours = rank, f"decoder.layers.{i}.", f"model.layers.{n}."
    mlp = [full[f"{ours}mlp.{name}_proj.weight"].chunk(tp)[t] for name in ("gate", "up")]
    return {
        f"{theirs}self_attention.linear_qkv.layer_norm_weight": full[f"{ours}input_layernorm.weight"],
        f"{theirs}self_attention.linear_qkv.weight": fused(full, ours, "weight", t, tp, version),
        f"{theirs}self_attention.linear_qkv.bias": fused(full, ours, "bias", t, tp, version),
        f"{theirs}self_attention.linear_qkv._extra_state": BytesIO(b"scales of fp8"),
        f"{theirs}self_attention.linear_proj.weight": full[f"{ours}self_attn.o_proj.weight"].chunk(tp, 1)[t].clone(),
        f"{theirs}self_attention.linear_proj.bias": full[f"{ours}self_attn.o_proj.bias"],
        f"{theirs}mlp.linear_fc1.layer_norm_weight": full[f"{ours}post_attention_layernorm.weight"],
        f"{theirs}mlp.linear_fc1.weight": torch.cat(mlp),
        f"{theirs}mlp.linear_fc2.weight": full[f"{ours}mlp.down_proj.weight"].chunk(tp, 1)[t].clone(),
    }


def args_of(enum: Enum, **options: Any) -> argparse.Namespace:
    shape = {"num_layers": LAYERS, "num_attention_heads": HEADS, "num_query_groups": KV, "group_query_attention": True}
    rest = {"swiglu": True, "model_type": enum, "params_dtype": torch.float64, "save": Path("runs"), "seed": 1}
    return argparse.Namespace(**{**shape, **rest, **options})


def write(
    path: Path, tp: int, stages: list[int], enum: Enum, *, version: float = 3.0, tied: bool = False, **options: Any
) -> None:
    """``stages``: how many layers each stage has."""
    full = model(tie_word_embeddings=tied).state_dict()
    tables = {n: full[f"{n}.weight"].chunk(tp) for n in ("model.embed_tokens", "lm_head")}
    path.mkdir()
    (path / "latest_checkpointed_iteration.txt").write_text("7\n")
    for p in range(len(stages)):
        for t in range(tp):
            state: dict[str, Any] = {}
            if p == 0:
                state["embedding.word_embeddings.weight"] = tables["model.embed_tokens"][t].clone()
            for i in range(stages[p]):
                state |= layer_of(full, sum(stages[:p]) + i, i, (t, tp), version)
            if p == len(stages) - 1:
                state["decoder.final_layernorm.weight"] = full["model.norm.weight"]
                if not tied or p:
                    state["output_layer.weight"] = tables["lm_head"][t].clone()
            folder = path / "iter_0000007" / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if len(stages) > 1 else ""))
            folder.mkdir(parents=True)
            states = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
            top = {"args": args_of(enum, **options), "checkpoint_version": version, "iteration": 7, "model": state}
            optimizer = {"param_groups": [{"step": 7}], "state": {0: {"exp_avg": torch.ones(3)}}}
            torch.save({**top, "optimizer": optimizer, "rng_state": [states]}, folder / "model_optim_rng.pt")


@pytest.mark.parametrize(
    ("saved", "version", "tied", "meshes"),
    [
        ((1, [3]), 3.0, False, [(1, 1), (1, 2), (1, 4)]),
        ((2, [2, 1]), 3.0, False, [(1, 1), (1, 2), (1, 4), (3, 1)]),
        # of both kv heads: q, k and v one after the other before version 1, by head from 2 on
        ((1, [3]), 0.0, False, [(1, 1), (1, 2)]),
        ((1, [3]), 2.0, False, [(1, 2)]),
        ((2, [2, 1]), 3.0, True, [(1, 2)]),
    ],
)
def test_on_any_mesh(
    saved: tuple[int, list[int]], version: float, tied: bool, meshes: list[tuple[int, int]], tmp_path: Path, enum: Enum
) -> None:
    """Loaded into a sharded Llama of other values, each parameter is its part of the unsharded one's."""
    write(tmp_path / "c", *saved, enum, version=version, tied=tied)
    want = model(tie_word_embeddings=tied).state_dict()

    def rank(ctx: ParallelContext) -> None:
        microbatches = None if ctx.mesh.axes["pp"] == 1 else 2
        ours = tpcore.parallelize(model(tie_word_embeddings=tied), num_microbatches=microbatches)
        for p in ours.parameters():
            nn.init.constant_(p, 0.5)
        assert load(tmp_path / "c", ours) == {"iteration": 7, "checkpoint_version": version}
        for name, p in ours.named_parameters():
            assert torch.equal(p, hf.part(want[name], p)), name

    for pp, tp in meshes:
        run_ranks(Mesh({"pp": pp, "dp": 1, "tp": tp}), rank)


def test_on_the_command_line(tmp_path: Path, enum: Enum) -> None:
    write(tmp_path / "c", 2, [2, 1], enum)
    with pytest.raises(
        CheckpointError, match=r"has shards, of which a folder is written: .*/w.safetensors names a file"
    ):
        convert(tmp_path / "c", tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()
    convert(tmp_path / "c", tmp_path / "ours")
    want = model().state_dict()
    for name in ("c", "ours"):
        consolidate(tmp_path / name, tmp_path / f"{name} whole")
        got = load_file(tmp_path / f"{name} whole" / "model.safetensors")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], value) for key, value in want.items())


def test_no_class_of_the_files_is_imported(tmp_path: Path, enum: Enum) -> None:
    write(tmp_path / "c", 2, [3], enum)
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("megatron")}
    assert modules
    assert inspect(tmp_path / "c" / "iter_0000007").tp == 2
    found = inspect(tmp_path / "c")
    assert (found.form, found.tp) == ("Megatron-LM's shards", 2)
    assert not any(name.startswith("megatron") for name in sys.modules)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"swiglu": False}, "only models with Llama's layers are read, not swiglu=False"),
        ({"apply_layernorm_1p": True}, "not apply_layernorm_1p=True"),
        ({"version": 1.0}, r"checkpoint_version=1\.0, 4 heads, 2 kv heads, tp=2: not read"),
        ({"num_query_groups": 1}, "4 heads, 1 kv heads, tp=2: not read"),
        ({"num_query_groups": 0}, "model_optim_rng.pt is damaged: ZeroDivisionError"),
        ({"num_attention_heads": "many"}, "model_optim_rng.pt is damaged: ValueError"),
        ({"num_attention_heads": 8}, "'model.layers.*linear_qkv.*' is not as its args say"),
    ],
)
def test_refused(options: dict[str, Any], error: str, tmp_path: Path, enum: Enum) -> None:
    write(tmp_path / "c", 2, [3], enum, **options)
    with pytest.raises(CheckpointError, match=error):
        inspect(tmp_path / "c")


def test_refused_files(tmp_path: Path, enum: Enum) -> None:
    write(tmp_path / "c", 2, [3], enum)
    file = tmp_path / "c" / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    top = {"args": args_of(enum), "checkpoint_version": 3.0}
    for state, error in (
        ({"decoder.layers.0.mlp.router.weight": torch.ones(2)}, "holds 'decoder.layers.0.mlp.router.weight'"),
        ({"language_model": {}}, "before megatron.core"),
        ({3: torch.ones(2)}, "is damaged: its model is no dict of names"),
    ):
        torch.save({**top, "model": state}, file)
        with pytest.raises(CheckpointError, match=error):
            inspect(tmp_path / "c")
    torch.save({**top, "model0": {}, "model1": {}}, file)
    with pytest.raises(CheckpointError, match="without 'model' and 'args'"):
        inspect(tmp_path / "c")
    file.unlink()
    file.parent.rmdir()
    (file.parents[1] / "mp_rank_00").rename(file.parents[1] / "mp_rank_02")
    with pytest.raises(CheckpointError, match="not tp rank 0 of pp rank 0"):
        inspect(tmp_path / "c")
