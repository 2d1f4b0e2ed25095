"""What other libraries left behind: each layout, made here as it is documented, loads to the right values."""

from __future__ import annotations

import json
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import values
from safetensors.torch import save_file
from torch import Tensor, nn

import tpcore
from tpcore.checkpoint import load
from tpcore.checkpoint.forms.registry import open_source
from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.read.source import CutRule, part
from tpcore.checkpoint.rewrite import consolidate, convert, reshard
from tpcore.checkpoint.stored import Stored
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.layout.shard import Block, ShardSpec
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

TP = 2
old_torch = pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")
pytestmark = [pytest.mark.usefixtures("no_fsync"), old_torch]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = tpcore.ColumnParallelLinear(4, 6, gather_output=False)
        self.down = tpcore.RowParallelLinear(6, 4, input_is_parallel=True)
        self.gate_up = tpcore.ColumnParallelLinear(4, 8, bias=False, blocks=2)
        self.norm = nn.LayerNorm(4)


SHAPES = {"up.weight": (6, 4), "up.bias": (6,), "down.weight": (4, 6), "down.bias": (4,)}
SHAPES |= {"gate_up.weight": (8, 4), "norm.weight": (4,), "norm.bias": (4,)}
RULES = [CutRule("up.*", 0), CutRule("down.weight", 1), CutRule("gate_up.weight", 0, 2)]


def full() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def shards(whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """As a rank's own state_dict would be: cut by hand, without ShardSpec."""
    out = dict(whole)
    out["up.weight"], out["up.bias"] = (whole[f"up.{n}"].chunk(TP)[rank].clone() for n in ("weight", "bias"))
    out["down.weight"] = whole["down.weight"].chunk(TP, 1)[rank].clone()
    gate, up = whole["gate_up.weight"].chunk(2)
    out["gate_up.weight"] = torch.cat([gate.chunk(TP)[rank], up.chunk(TP)[rank]])
    return out


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
        state = {"model": shards(full(), rank), "epoch": 3}
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


LAYOUTS = ["directory", "file", "stages", "xser", "trainer", "shards", "older"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_into_a_model(layout: str, tmp_path: Path, reference: type) -> None:
    """The model says how each tensor is cut, so that it loads at this degree and at others."""
    write(tmp_path / "c", layout, reference)

    def read(ctx: ParallelContext) -> None:
        model = Net()
        n = ctx.mesh.axes["tp"]
        rest = load(tmp_path / "c", model)
        for name, spec in tpcore.layers.shard_specs(model).items():
            torch.testing.assert_close(model.state_dict()[name], spec.shard(full()[name], ctx.rank, n), rtol=0, atol=0)
        assert rest == {"epoch": 3}

    for tp in (TP, 1):
        run_ranks(Mesh({"tp": tp}), read)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offline(layout: str, tmp_path: Path, reference: type) -> None:
    write(tmp_path / "c", layout, reference)
    rules = RULES[2:] if layout == "shards" else RULES
    convert(tmp_path / "c", tmp_path / "ours", rules=rules)
    reshard(tmp_path / "c", tmp_path / "three", 3, rules=rules)
    for found in (
        values(tmp_path / "c", rules),
        values(tmp_path / "ours", tp=TP, trust=False),
        values(tmp_path / "three", tp=3, trust=False),
    ):
        assert found.keys() == full().keys()
        assert all(torch.equal(found[name], t) for name, t in full().items())


def test_a_cut_that_nobody_knows(tmp_path: Path, reference: type) -> None:
    """Neither guessed nor averaged: what differs between ranks has to be said."""
    write(tmp_path / "c", "directory", reference)
    with pytest.raises(CheckpointError, match=r"(?s)how it is cut is not on record.*--cut"):
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
            source = open_source(str(tmp_path / "c"), Reading(), stack)
            found: Stored = source.stage(0, None, lambda name, shape, m: spec).model()["k"]
            return found

    assert torch.equal(part(k(), 0, 1), heads.view(4, 2))
    torch.save({"model": {"k": heads[0] + 1}}, tmp_path / "c" / "tp_rank_2" / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="copies of the same heads"):
        k()


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("exploded",)


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
class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = tpcore.ColumnParallelLinear(4, 8, gather_output=False)
        self.gate_up = tpcore.ColumnParallelLinear(4, 8, bias=False, blocks=2)
        self.down = tpcore.RowParallelLinear(8, 4, input_is_parallel=True)
        self.norm = nn.LayerNorm(4)


def stepped(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, in two groups and made of nameless parameters, after so many steps."""
    tpcore.random.manual_seed(0)
    net = Trained()
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
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
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
            with pytest.raises(CheckpointError, match=r"groups of \[3, 4\] parameters, this one of \[3\]"):
                load(tmp_path / "c", few, model_key="optimizer")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "left out: optimizer in", UserWarning)
        run_ranks(Mesh({"tp": n}), read)


def test_what_lies_beside_a_model_goes_with_it(tmp_path: Path) -> None:
    """Or is an error, but never dropped without a word."""
    write_trained(tmp_path / "c", 2)
    rules = [CutRule("up.*", 0), CutRule("down.weight", 1), CutRule("gate_up.weight", 0, 2)]
    with pytest.raises(CheckpointError, match=r"optimizer in .* only at the degree of the save, tp=2"):
        reshard(tmp_path / "c", tmp_path / "out", 4, rules=rules)
    (left,) = reshard(tmp_path / "c", tmp_path / "out", 4, rules=rules, strict=False)
    assert left.startswith("optimizer in")
    (rest,) = run_ranks(Mesh({"tp": 1}), lambda ctx: load(tmp_path / "out", stepped(0)[0]))
    assert rest == {"epoch": 3}


# -- Hugging Face directories -------------------------------------------------------------------------------
def huggingface(path: Path, prefix: str = "", files: int = 2) -> None:
    path.mkdir()
    named = {prefix + name: t for name, t in full().items()}
    weight_map = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(named)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in named.items() if weight_map[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("prefix", ["", "base.", "a.b."])
def test_several_files_and_prefixes(prefix: str, tmp_path: Path) -> None:
    huggingface(tmp_path / "hf", prefix)

    def read(ctx: ParallelContext) -> None:
        model = Net()
        load(tmp_path / "hf", model, sharded=False)
        for name, spec in tpcore.layers.shard_specs(model).items():
            assert torch.equal(model.state_dict()[name], spec.shard(full()[name], ctx.rank, TP)), name

    run_ranks(Mesh({"tp": TP}), read)


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
