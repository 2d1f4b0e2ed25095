"""Files of other libraries, and unsharded ones: each layout, made here as documented, loads to the right values."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import RULES, WANTED, Bomb, Net, assert_parts, full, values
from safetensors.torch import save_file
from torch import Tensor, nn

import tpcore
from tpcore.checkpoint import load
from tpcore.checkpoint.forms.rank_files import RankFiles, even_spec, grid
from tpcore.checkpoint.forms.source import Fill, Form, Reading, Source, SpecOf, Stage, State
from tpcore.checkpoint.read import source
from tpcore.checkpoint.read.source import read_shards, unsharded
from tpcore.checkpoint.stored import MemoryShard, Stored
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.layout.shard import Block, ShardSpec
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_convert.inspect import diff, inspect, verify
from tpcore_convert.rewrite import consolidate, convert, reshard

TP = 2
old_torch = pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")
pytestmark = [pytest.mark.usefixtures("no_fsync"), old_torch]


def shards(rank: int) -> dict[str, Tensor]:
    """As a rank's own state_dict would be: cut by hand, without ShardSpec."""
    whole = full()
    out = dict(whole)
    out["up.weight"], out["up.bias"] = (whole[f"up.{n}"].chunk(TP)[rank].clone() for n in ("weight", "bias"))
    out["down.weight"] = whole["down.weight"].chunk(TP, 1)[rank].clone()
    gate, up = whole["gate_up.weight"].chunk(2)
    out["gate_up.weight"] = torch.cat([gate.chunk(TP)[rank], up.chunk(TP)[rank]])
    return out


# -- a form of our own: all that a reader of such files has to write -----------------------------------------
class Npz(RankFiles):
    form = "npz shards"

    def read(self, file: str) -> tuple[Mapping[str, Any], dict[Any, Any]]:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}, {}


def open_npz(path: str, how: Reading, stack: ExitStack) -> Source | None:
    names = os.listdir(path) if os.path.isdir(path) else []
    matches = [match for match in (re.fullmatch(r"shard_(\d+)\.npz", name) for name in names) if match]
    files = {(0, int(match[1])): os.path.join(path, match[0]) for match in matches}
    return Npz(path, grid(path, files), how) if files else None


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    known = tuple(source.forms())
    monkeypatch.setattr(source, "forms", lambda: (Form(sharded=True, open=open_npz), *known))


def test_blocks_of_a_form_are_those_of_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.arange(8.0)[:, None].repeat(1, 4)
    for r, parts in enumerate(zip(*(half.chunk(2) for half in full.chunk(2)), strict=True)):
        np.savez(tmp_path / f"shard_{r}.npz", weight=torch.cat(parts).numpy())
    monkeypatch.setattr(Npz, "spec", lambda self, name, shape, pp_rank: even_spec(shape, self.tp, 0, stride=2))

    def rank(ctx: ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(4, 8, bias=False, blocks=2)
        load(tmp_path, layer)
        assert torch.equal(layer.weight, full if ctx.comm("tp").size == 1 else torch.cat(parts_of(ctx)))
        with pytest.raises(CheckpointError, match=r"'weight' is stored as .* make the layer with the blocks"):
            load(tmp_path, tpcore.ColumnParallelLinear(4, 8, bias=False))

    def parts_of(ctx: ParallelContext) -> list[torch.Tensor]:
        return [half.chunk(2)[ctx.rank] for half in full.chunk(2)]

    for tp in (1, 2):
        run_ranks(Mesh({"tp": tp}), rank)


@pytest.fixture
def reference() -> Iterator[type]:
    """torch_xla's class as a file names it; gone again before anything is read."""
    modules = {name: types.ModuleType(name) for name in _PACKAGE}

    class TensorReference:
        def __init__(self, tid: int) -> None:
            self.tid = tid

    TensorReference.__module__, TensorReference.__qualname__ = _PACKAGE[-1], "TensorReference"
    modules[_PACKAGE[-1]].TensorReference = TensorReference  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in _PACKAGE}
    sys.modules.update(modules)
    yield TensorReference
    for name, module in before.items():
        sys.modules.pop(name, None) if module is None else sys.modules.update({name: module})


_PACKAGE = ["torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"]


def xser(state: dict[str, Any], path: Path, reference: type) -> None:
    """A reference file and a folder of tensors."""
    (path.parent / f"{path.name}.tensors").mkdir(parents=True)
    model = {}
    for i, (name, t) in enumerate(state["model"].items()):
        torch.save(t, path.parent / f"{path.name}.tensors" / f"tensor_{i}.pt")
        model[name] = reference(i)
    torch.save({**state, "model": model}, path)


def write(path: Path, layout: str, reference: type) -> None:
    for rank in range(TP):
        state = {"model": shards(rank), "epoch": 3}
        file = {
            "directory": path / f"tp_rank_{rank}" / "checkpoint.pt",
            "file": path / f"tp_rank_{rank:02d}",
            "stages": path / f"tp_rank_{rank:02d}_pp_rank_00" / "checkpoint.pt",
            "xser": path / f"tp_rank_{rank:02d}_pp_rank_00",
            "trainer": path / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt",
            "shards": path / "shards" / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt",
            "older": path / "tensor_parallel_shards" / f"tp_rank_{rank:02d}_pp_rank_00" / "checkpoint.pt",
        }[layout]
        file.parent.mkdir(parents=True, exist_ok=True)
        if layout == "shards":  # another data-parallel rank, which may write its own, of the same values
            (file.parent / file.name.replace("dp_rank_00", "dp_rank_01")).write_bytes(b"not read")
        if layout in ("xser", "trainer"):
            xser(state, file, reference)
        elif layout == "file":
            torch.save({**state, "tp_rank": rank}, file)
        else:
            torch.save(state, file)
    if layout == "shards":
        dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        cut = {"tensor_model_parallel": True, "partition_stride": 1, "num_partitions": TP}
        parameters = {n: {**cut, "partition_dim": d} for n, d in dims.items()}
        parameters["norm.weight"] = {"tensor_model_parallel": False}
        text = json.dumps({"parameters": parameters, "model_weight_transformation_specs": []})
        (path / "shards" / "mp_metadata_pp_rank_0.json").write_text(text)


def huggingface(path: Path, prefix: str = "") -> None:
    path.mkdir()
    named = {prefix + name: t for name, t in full().items()}
    weight_map = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(named)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in named.items() if weight_map[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def written(home: Path, kind: str, reference: type) -> tuple[Path, dict[str, Any]]:
    """The files, and the entries that they hold beside the model."""
    path = home / kind
    if kind == "npz":
        path.mkdir()
        for rank in range(TP):
            np.savez(path / f"shard_{rank:03d}.npz", **{name: t.numpy() for name, t in shards(rank).items()})
    elif kind.startswith("hf"):
        huggingface(path, kind[3:])
    elif kind.startswith("ours"):
        save_file(full(), home / "whole.safetensors")
        reshard(home / "whole.safetensors", path, int(kind[-1]), rules=RULES)
    elif kind == "flat.safetensors":
        save_file(full(), path)
    elif kind.startswith("flat"):
        torch.save(full(), path)
    elif kind == "nested.pt":
        torch.save({"model": full(), "epoch": 3, "more": (1, [2])}, path)
        return path, {"epoch": 3, "more": (1, [2])}
    else:
        write(path, kind, reference)
        return path, {"epoch": 3}
    return path, {}


LAYOUTS = ["directory", "file", "stages", "xser", "trainer", "shards", "older"]
"""Of NeuronX Distributed and optimum-neuron."""
WHOLE = ["nested.pt", "flat.pt", "flat.bin", "flat.safetensors", "hf", "hf base.", "hf a.b."]


@pytest.mark.parametrize("kind", [*LAYOUTS, "npz", *WHOLE, "ours 1", "ours 2", "ours 3"])
def test_into_a_model_and_as_plain_shards(kind: str, tmp_path: Path, reference: type) -> None:
    """The model, or what is wanted, says how each tensor is sharded, so that it loads at any degree."""
    path, rest = written(tmp_path, kind, reference)

    def read(ctx: ParallelContext, device: str | None, dtype: torch.dtype) -> None:
        model, rank, n = Net(device, dtype), ctx.coord("tp"), ctx.mesh.axes["tp"]
        assert load(path, model, sharded=kind not in WHOLE) == rest
        assert_parts(model.state_dict(), rank, n, dtype)
        found = read_shards(path, WANTED, rank, n)
        assert_parts(found, rank, n)
        assert all(t.is_contiguous() for t in found.values())

    for axes, device, dtype in (
        ({"tp": 1}, None, torch.float32),
        ({"dp": 2, "tp": 2}, "meta", torch.float64),
        ({"tp": 3}, "meta", torch.float32),
        ({"tp": 4}, None, torch.float64),
    ):
        run_ranks(Mesh(axes), lambda ctx: read(ctx, device, dtype))  # noqa: B023


class Halves(Source):
    """A form of two stages, of which each holds a layer."""

    form, path, tp, pp = "file of halves", "halves", 1, 2

    def stage(self, pp_rank: int, own: int | None, cuts: SpecOf) -> Stage:
        return Half(str(pp_rank))


class Half(Stage):
    def __init__(self, layer: str) -> None:
        self.layer = layer

    def model(self, fill: Fill | None = None) -> State:
        shard = MemoryShard(full()["up.weight"])
        return {f"{self.layer}.weight": Stored.over_tp(self.layer, ShardSpec((8, 4), 0), 1, None, lambda i: shard)}

    def entries(self, fill: Fill, without: Collection[Any] = (), *, model: bool = False) -> Any:
        return {"stage": self.layer}


def test_a_form_of_stages_that_opens_at_its_own_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "forms", lambda: [Form(sharded=True, open=lambda path, how, stack: Halves())])

    def read(ctx: ParallelContext) -> None:
        rank, n = ctx.coord("tp"), ctx.mesh.axes["tp"]
        at = str(ctx.mesh.coords(ctx.rank).get("pp", 0))
        model = nn.ModuleDict({at: tpcore.ColumnParallelLinear(4, 8, bias=False)})
        assert load("halves", model) == {"stage": at}
        assert torch.equal(model.state_dict()[f"{at}.weight"], full()["up.weight"].chunk(n)[rank])

    for tp in (1, 2):
        run_ranks(Mesh({"pp": 2, "tp": tp}), read)
    with pytest.raises(CheckpointError, match="halves was saved at pp=2, and a file of halves opens at that pp alone"):
        run_ranks(Mesh({"tp": 1}), read)


@pytest.mark.parametrize("kind", [*LAYOUTS, "npz"])
def test_offline(kind: str, tmp_path: Path, reference: type) -> None:
    path, _ = written(tmp_path, kind, reference)
    rules = RULES[2:] if kind == "shards" else RULES
    found = inspect(path, rules=rules)
    assert (found.form, found.tp) == ("npz shards" if kind == "npz" else "pickled shards", TP)
    assert verify(path, rules=rules) == []
    convert(path, tmp_path / "ours", rules=rules)
    reshard(path, tmp_path / "three", 3, rules=rules)
    assert list(diff(path, tmp_path / "three", rules=rules)) == []
    for there in (
        values(path, rules),
        values(tmp_path / "ours", tp=TP, trust=False),
        values(tmp_path / "three", tp=3, trust=False),
    ):
        assert_parts(there, 0, 1)


def test_a_cut_that_nobody_knows(tmp_path: Path, reference: type) -> None:
    """Neither guessed nor averaged: what differs between ranks has to be said."""
    write(tmp_path / "c", "directory", reference)
    with pytest.raises(CheckpointError, match=r"(?s)how it is sharded is not on record.*--cut"):
        consolidate(tmp_path / "c", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["c"]


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_order_of_copied_heads(order: tuple[int, ...], tmp_path: Path) -> None:
    """Two heads on four ranks, as neighbours or in turns: the values say which."""
    heads = torch.arange(8.0).view(2, 2, 2)
    for rank, head in enumerate(order):
        (tmp_path / "c" / f"tp_rank_{rank}").mkdir(parents=True)
        torch.save({"model": {"k": heads[head]}}, tmp_path / "c" / f"tp_rank_{rank}" / "checkpoint.pt")
    spec = ShardSpec((4, 2), 0, (Block(4, 2, True),))

    def k() -> Stored:
        with ExitStack() as stack:
            opened = source.open_source(str(tmp_path / "c"), Reading(), stack)
            found: Stored = opened.stage(0, None, lambda name, shape, m: spec).model()["k"]
            return found

    assert torch.equal(unsharded(k()), heads.view(4, 2))
    torch.save({"model": {"k": heads[0] + 1}}, tmp_path / "c" / "tp_rank_2" / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="copies of the same heads"):
        k()


@pytest.mark.parametrize("layout", ["directory", "file", "xser"])
def test_code_is_not_run(layout: str, tmp_path: Path, reference: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "c", layout, reference)
    file = {"directory": "tp_rank_1/checkpoint.pt", "file": "tp_rank_01", "xser": "tp_rank_01_pp_rank_00"}[layout]
    torch.save({"model": {"x": Bomb()}}, tmp_path / "c" / file, pickle_module=pickle)
    with pytest.raises(CheckpointError, match="could run code"):
        consolidate(tmp_path / "c", tmp_path / "out", rules=RULES)
    assert sorted(os.listdir(tmp_path)) == ["c"]


def test_pickles_are_refused_without_trust(tmp_path: Path, reference: type) -> None:
    write(tmp_path / "c", "directory", reference)

    def read(ctx: ParallelContext) -> None:
        with pytest.raises(
            CheckpointError, match=r"checkpoint\.pt is a pickle, which trust=False .*where it is trusted"
        ):
            load(tmp_path / "c", Net(), trust=False)

    run_ranks(Mesh({"tp": TP}), read)


def test_a_reference_out_of_its_folder(tmp_path: Path, reference: type) -> None:
    write(tmp_path / "c", "xser", reference)
    for tid in ("../../secret", -1, None):
        torch.save({"model": {"x": reference(tid)}}, tmp_path / "c" / "tp_rank_01_pp_rank_00")
        with pytest.raises(CheckpointError, match="is damaged: it refers to a tensor"):
            consolidate(tmp_path / "c", tmp_path / "out", rules=RULES)


# -- optimizers ---------------------------------------------------------------------------------------------
def stepped(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, in two groups and made of nameless parameters, after so many steps."""
    tpcore.random.manual_seed(0)
    net = Net()
    decayed = [p for p in net.parameters() if p.ndim > 1]
    groups = [{"params": decayed}, {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = p.detach() ** 2 + 1
        optimizer.step()
    return net, optimizer


def write_trained(path: Path, tp: int) -> None:
    def one(ctx: ParallelContext) -> None:
        net, optimizer = stepped()
        model = {name: t.clone() for name, t in net.state_dict().items()}  # without marks, as other libraries have it
        state = {"model": model, "optimizer": optimizer.state_dict(), "epoch": 3}
        file = path / f"tp_rank_{ctx.rank}" / "checkpoint.pt" if tp > 1 else path
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, file)

    run_ranks(Mesh({"tp": tp}), one)


@pytest.mark.parametrize(("m", "n"), [(2, 4), (2, 2), (1, 2)])
def test_an_optimizer_knows_its_parameters(m: int, n: int, tmp_path: Path) -> None:
    """Nameless, and yet at another degree: what it would be after the same steps there."""
    write_trained(tmp_path / "c", m)

    def read(ctx: ParallelContext) -> None:
        want = stepped()[1].state_dict()
        optimizer = stepped(0)[1]
        rest = load(tmp_path / "c", optimizer, model_key="optimizer", sharded=m > 1)
        got = optimizer.state_dict()
        assert got["param_groups"] == want["param_groups"]
        for index, of_parameter in want["state"].items():
            for key, value in of_parameter.items():
                torch.testing.assert_close(got["state"][index][key], value, rtol=0, atol=0)
        assert rest["epoch"] == 3
        model = stepped(0)[0]
        if m > 1 and m != n:
            with pytest.raises(CheckpointError, match=r"optimizer in .*tp=2.*does not name"):
                load(tmp_path / "c", model)
            assert load(tmp_path / "c", model, strict=False) == {"epoch": 3}
            few = torch.optim.AdamW(list(model.parameters())[:3])
            with pytest.raises(CheckpointError, match=r"groups of \[4, 4\] parameters, this one of \[3\]"):
                load(tmp_path / "c", few, model_key="optimizer")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "left out: optimizer in", UserWarning)
        run_ranks(Mesh({"tp": n}), read)


def test_what_lies_beside_a_model_goes_with_it(tmp_path: Path) -> None:
    """Or is an error, but never dropped without a word."""
    write_trained(tmp_path / "c", 2)
    with pytest.raises(CheckpointError, match=r"optimizer in .* only at the degree of the save, tp=2"):
        reshard(tmp_path / "c", tmp_path / "out", 4, rules=RULES)
    (left,) = reshard(tmp_path / "c", tmp_path / "out", 4, rules=RULES, strict=False)
    assert left.startswith("optimizer in")
    (rest,) = run_ranks(Mesh({"tp": 1}), lambda ctx: load(tmp_path / "out", stepped(0)[0]))
    assert rest == {"epoch": 3}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../outside.safetensors", "which is not a file in"),
        ("/etc/passwd", "which is not a file in"),
        ("x\0.safetensors", "which is not a file in"),
        ("link.safetensors", "is a link out of"),
        ("missing.safetensors", "is missing"),
        ("", "which is not a file in"),
        (["x"], "has no weight_map"),
    ],
)
def test_an_index_that_points_elsewhere(file: Any, message: str, tmp_path: Path) -> None:
    huggingface(tmp_path / "hf")
    save_file(full(), tmp_path / "outside.safetensors")
    (tmp_path / "hf" / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(full(), file)}))
    with pytest.raises(CheckpointError, match=message):
        consolidate(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
