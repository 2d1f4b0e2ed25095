"""Checkpoints that do not fit, are damaged or cannot be written: every rank raises, nothing is half done."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import deep, edit, refit
from helpers.worlds import each_rank
from torch import nn

import tpcore
from tpcore.checkpoint import load, save
from tpcore.checkpoint.storage.publish import Staging
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext, use
from tpcore.testing import run_ranks
from tpcore.trace.artifact import FORMAT as TRACED
from tpcore.trace.artifact import PROGRAMS

pytestmark = pytest.mark.usefixtures("no_fsync")

MESH = Mesh({"dp": 2, "tp": 2})


class Net(nn.Module):
    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32, more: bool = False) -> None:
        super().__init__()
        self.a = tpcore.ColumnParallelLinear(3, width, dtype=dtype)
        self.b = nn.Linear(2, 3, dtype=dtype)
        if more:
            self.c = nn.Linear(1, 2)
        self.register_buffer("count", torch.tensor([1, 2]))


def errors_on_all_ranks(fn: Callable[[ParallelContext], Any], mesh: Mesh = MESH) -> list[str]:
    """The message of every rank's error, which must be of the two kinds that users are promised."""

    def one(ctx: ParallelContext) -> str:
        with pytest.raises((CheckpointError, ValueError)) as caught:
            fn(ctx)
        return str(caught.value)

    messages = run_ranks(mesh, one)
    assert all(messages)
    return messages


def saved(path: Path, mesh: Mesh = MESH) -> Path:
    def write(ctx: ParallelContext) -> None:
        torch.manual_seed(0)
        save({"model": Net().state_dict(), "epoch": 1}, path)

    run_ranks(mesh, write)
    return path


def refuses(path: Path, build: Callable[[], nn.Module] = Net, mesh: Mesh = MESH, **options: Any) -> list[str]:
    """Load into a model on every rank: fails on all, and leaves every model as it was."""

    def read(ctx: ParallelContext) -> None:
        model = build()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        try:
            load(path, model, **options)
        finally:
            for name, t in model.state_dict().items():
                assert torch.equal(t, before[name]), name

    return errors_on_all_ranks(read, mesh)


# -- what does not fit the model ----------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [MESH, Mesh({"tp": 4})])
def test_missing_extra_and_misshapen(tmp_path: Path, mesh: Mesh) -> None:
    path = saved(tmp_path / "c")
    for message in refuses(path, lambda: Net(more=True), mesh):
        assert "'c.weight': the model has shape (2, 1), the checkpoint nothing" in message
    for message in refuses(path, lambda: Net(width=8), mesh):
        of_rank = f", of which this rank holds ({8 // mesh.axes['tp']}, 3)"
        assert f"'a.weight': the checkpoint has shape (4, 3), the model (8, 3){of_rank}" in message
        assert "'a.bias': the checkpoint has shape (4,), the model (8,)" in message
    for message in refuses(path, lambda: tpcore.ColumnParallelLinear(3, 4), mesh):
        assert "'a.weight'" in message
        assert "the model nothing" in message
        assert str(path) in message
    for message in refuses(path, lambda: nn.ModuleDict({"_orig_mod": Net()}), mesh):  # as torch.compile wraps it
        assert "(names differ by torch.compile's '_orig_mod.': save and load the module that it has there):" in message


def test_one_rank_alone_does_not_fit(tmp_path: Path) -> None:
    """The others learn of it instead of waiting, and change nothing."""
    path = saved(tmp_path / "c")

    def read(ctx: ParallelContext) -> None:
        model = Net(more=ctx.rank == 3)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        try:
            load(path, model)
        finally:
            assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

    messages = errors_on_all_ranks(read)
    assert "c.weight" in messages[3]
    assert all(m.startswith("rank 3: ") and "c.weight" in m for m in messages[:3])


def test_not_strict(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")

    def read(ctx: ParallelContext) -> None:
        state = load(path)["model"]
        model = Net(more=True)
        del model.b
        if ctx.rank:
            assert load(path, model, strict=False) == {"epoch": 1}
        else:
            with pytest.warns(UserWarning, match=r"(?s)'c.weight'.*nothing.*'b.weight'.*nothing"):
                load(path, model, strict=False)
        assert torch.equal(model.a.weight, state["a.weight"])

    run_ranks(MESH, read)
    assert all("(8, 3)" in m for m in refuses(path, lambda: Net(width=8), strict=False))


def test_dtypes(tmp_path: Path) -> None:
    """The model's dtype rules: floats are converted, a loss of precision is said, other kinds are refused."""
    path = saved(tmp_path / "c")

    def read(ctx: ParallelContext) -> None:
        state = load(path)["model"]
        wide = Net(dtype=torch.float64)
        load(path, wide)
        assert torch.equal(wide.a.weight, state["a.weight"].double())
        narrow = Net(dtype=torch.bfloat16)
        if ctx.rank:
            load(path, narrow)
        else:
            with pytest.warns(UserWarning, match="'a.weight': from torch.float32 to the model's torch.bfloat16"):
                load(path, narrow)
        assert narrow.a.weight.dtype == torch.bfloat16
        assert torch.equal(narrow.a.weight, state["a.weight"].bfloat16())

    run_ranks(MESH, read)

    def floating() -> nn.Module:
        model = Net()
        model.count = torch.tensor([0.0, 0.0])
        return model

    assert all(
        "'count': the checkpoint has dtype torch.int64, the model torch.float32" in m for m in refuses(path, floating)
    )


def test_ties(tmp_path: Path) -> None:
    """One tensor under two names in the model: one name is enough, two different values are an error."""

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    one, two = {"0.weight": torch.eye(2)}, {"0.weight": torch.eye(2), "1.weight": torch.eye(2)}
    other = {"0.weight": torch.eye(2), "1.weight": torch.ones(2, 2)}

    def check(ctx: ParallelContext) -> None:
        for i, state in enumerate((one, two)):
            save(state, tmp_path / str(i))
            model = tied()
            load(tmp_path / str(i), model)
            assert torch.equal(model[1].weight, torch.eye(2))
        save(other, tmp_path / "c")

    run_ranks(Mesh({"tp": 2}), check)
    assert all("'1.weight' and '0.weight' are one tensor" in m for m in refuses(tmp_path / "c", tied))


def test_no_model_in_it(tmp_path: Path) -> None:
    run_ranks(Mesh({"tp": 1}), lambda ctx: save({"net": Net().state_dict(), "epoch": 1}, tmp_path / "c"))
    assert "no model under 'model'" in refuses(tmp_path / "c", mesh=Mesh({"tp": 1}))[0]
    run_ranks(Mesh({"tp": 1}), lambda ctx: load(tmp_path / "c", Net(), model_key="net"))


@each_rank(tp=2)
def test_extra_state_and_hooks(ctx: ParallelContext, tmp_path: Path) -> None:
    """What is in a state_dict and is no parameter goes through the module's own loading."""

    class Odd(nn.Module):
        def __init__(self, seen: Any) -> None:
            super().__init__()
            self.seen = seen
            self.w = nn.Parameter(torch.zeros(2))

        def get_extra_state(self) -> Any:
            return {"seen": self.seen, "tensor": torch.tensor([1.5])}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"], float(state["tensor"])

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "made_up"] = torch.tensor([float(len(self.seen))])

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            self.made_up = float(state_dict.pop(prefix + "made_up"))
            super()._load_from_state_dict(state_dict, prefix, *args)

    save({"model": Odd((1, 2, 3)).state_dict()}, tmp_path / "c")
    model = Odd(())
    load(tmp_path / "c", model)
    assert model.seen == ((1, 2, 3), 1.5)
    assert model.made_up == 3.0


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.empty_like(self.scale, device=x.device)  # as transformers' masks do


@each_rank(tp=1)
def test_a_module_whose_buffer_stays_on_meta_does_not_compute(ctx: ParallelContext, tmp_path: Path) -> None:
    save(_Scaled().state_dict(), tmp_path / "c")
    with torch.device("meta"):
        inner = _Scaled()
    model = nn.Sequential(inner.requires_grad_(False))
    with pytest.warns(UserWarning, match="(?s)still on meta.*'scale'"):
        load(tmp_path / "c", inner)
    assert not inner.linear.weight.requires_grad
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"_Scaled\.scale has no values: on meta since"):
            one(torch.zeros(1, 2))
        one[0].scale = torch.ones(2)
        one(torch.zeros(1, 2))
        assert not one[0]._forward_pre_hooks


# -- what is damaged ----------------------------------------------------------------------------------------
def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def _link(path: Path) -> None:
    shutil.move(path, path.parent.parent.parent / path.name)
    path.symlink_to(path.parent.parent.parent / path.name)


MANIFEST, STATE, MODEL = "manifest.json", "tp_rank_1/state.json", "tp_rank_1/model.safetensors"
DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no manifest": (MANIFEST, Path.unlink, "manifest.json is missing"),
    "no rank": ("tp_rank_1", shutil.rmtree, "is missing"),
    "surplus rank": ("tp_rank_2", Path.mkdir, "of no rank"),
    "no state": (STATE, Path.unlink, "No such file"),
    "no tensors": (MODEL, Path.unlink, "No such file"),
    "truncated": (MODEL, lambda p: os.truncate(p, 100), "has 100 bytes, not"),
    "truncated state": (STATE, lambda p: os.truncate(p, 100), "has 100 bytes, not"),
    "truncated manifest": (MANIFEST, lambda p: os.truncate(p, 100), "is damaged"),
    "flipped state": (STATE, lambda p: _flip(p, 300), "has another checksum"),
    "flipped header": (MODEL, lambda p: _flip(p, 3), "not a whole safetensors file"),
    "flipped tensor": (MODEL, lambda p: _flip(p, -40), "'a.weight' is damaged: its crc32"),
    "link": (MODEL, _link, "is a link"),
    "newer version": (MANIFEST, lambda p: edit(p, lambda d: d.update(version=3)), "format version 3"),
    "foreign format": (MANIFEST, lambda p: edit(p, lambda d: d.update(format="x")), "is not of a checkpoint"),
    "not JSON": (MANIFEST, lambda p: p.write_text('{"format": NaN}'), "is damaged: NaN is not JSON"),
    "not an object": (MANIFEST, lambda p: p.write_text("[1]"), "is not of a checkpoint"),
    "no mesh": (MANIFEST, lambda p: edit(p, lambda d: d.pop("mesh")), "is damaged: KeyError: 'mesh'"),
    "other mesh": (MANIFEST, lambda p: edit(p, lambda d: d.update(mesh={"tp": 3})), "its mesh {'tp': 3}"),
    "bad name": (
        MANIFEST,
        lambda p: edit(p, lambda d: d["files"].update({"tp_rank_0/../../x": {"bytes": 1, "crc32": "0"}})),
        "'tp_rank_0/../../x', which is no file",
    ),
    "not listed": (MANIFEST, lambda p: edit(p, lambda d: d["files"].pop(MODEL)), "is not listed"),
}


def record(top: Any) -> Any:
    return top["tensors"]["model.safetensors"]["b.weight"]


def of_rank(change: Callable[[Any], object]) -> tuple[str, Callable[[Path], Any], str]:
    """A change to the state of a rank, whose size and sum are right again."""
    return STATE, lambda p: refit(p.parents[1], STATE, change), ""


def by(value: Any) -> tuple[str, Callable[[Path], Any], str]:
    """Another encoding of an entry."""
    return of_rank(lambda top: top["state"].update(epoch=value))


SPEC = {"shape": [3, 2], "dim": 0, "blocks": [[3, 0, 0]]}
DAMAGE |= {
    "unit": of_rank(lambda top: record(top).update(spec=SPEC)),
    "blocks": of_rank(lambda top: record(top).update(spec=SPEC | {"blocks": [[0, 1, 0]] * 10**5})),
    "infinite": of_rank(lambda top: record(top).update(shape=["1e400", 3])),
    "another shape": (
        MODEL,
        lambda p: refit(p.parents[1], STATE, lambda top: record(top).update(shape=[3, 2, 1])),
        "'b.weight' is F32 [3, 2], on record float32 [3, 2, 1]",
    ),
    "a dtype of a tensor": of_rank(lambda top: record(top).update(dtype="load")),
    "no dict": of_rank(lambda top: top.update(state=[1])),
    "deep": by(deep(900)),
    "no items": by({"$": "tuple"}),
    "items of one": by({"$": "dict", "items": [[1], 2]}),
    "items a number": by({"$": "dict", "items": 7}),
    "a dtype": by({"$": "dtype", "value": "load"}),
    "key a list": by({"$": "dict", "items": [[[1], 2]]}),
    "half a character": (MANIFEST, lambda p: edit(p, lambda d: d["files"].update({"\ud800": {}})), ""),
    "written by": (MANIFEST, lambda p: edit(p, lambda d: d.update(written_by=[[1, 2, 3]])), ""),
    "mesh": (MANIFEST, lambda p: edit(p, lambda d: d["mesh"].update(tp=10**8)), ""),
    "mesh of pp": (MANIFEST, lambda p: edit(p, lambda d: d["mesh"].update(pp=10**8)), ""),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damage(damage: str, tmp_path: Path) -> None:
    """At this degree and at another, and on the ranks that did not meet it: tp rank 0's files are right."""
    path = saved(tmp_path / "c")
    name, spoil, expected = DAMAGE[damage]
    spoil(path / name)
    for message in refuses(path) + refuses(path, mesh=Mesh({"tp": 1})):
        assert expected in message
        assert name in message


def test_ranks_of_two_saves(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b")
    shutil.copy(b / STATE, a / STATE)
    assert all("another save" in m for m in refuses(a))
    shutil.copy(b / MANIFEST, a / MANIFEST)
    assert all("another save" in m for m in refuses(a))
    c, d = saved(tmp_path / "c"), saved(tmp_path / "d")
    shutil.copy(d / MODEL, c / MODEL)
    assert all(f"{MODEL} is of another save" in m for m in refuses(c))


def test_two_checkpoints_at_once(tmp_path: Path) -> None:
    """Ranks that see different saves under one name, as during a replacement, load neither."""
    paths = [saved(tmp_path / "a"), saved(tmp_path / "b")]
    messages = errors_on_all_ranks(lambda ctx: load(paths[ctx.rank % 2], Net()))
    assert all("was replaced while it was opened" in m for m in messages)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: saved(p.parent / "step_9"), "c does not exist, and "),
        (lambda p: p.mkdir(), "is missing (it is empty)"),
        (lambda p: (p / "tp_rank_x").mkdir(parents=True), "it holds ['tp_rank_x']"),
        (lambda p: (saved(p / "step_9"), saved(p / "step_10")), "c/step_10, the newest (tpcore.checkpoint.latest)"),
        (lambda p: p.write_text("x"), "is a file: give sharded=False"),
    ],
)
def test_no_checkpoint(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    make(tmp_path / "c")
    for said in refuses(tmp_path / "c"):
        assert message in said
        assert str(tmp_path / "c") in said


# -- what cannot be saved -----------------------------------------------------------------------------------
def _cycle() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["x"] = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: {"a": [0, {"b": object()}]}, "a[1].b: builtins.object"),
        (lambda: {"loss": np.float64(1)}, "loss: numpy.float64; pass torch.from_numpy(x) for an array, x.item()"),
        (lambda: {"loss": np.zeros(2)}, "loss: numpy.ndarray"),
        (lambda: {"status": HTTPStatus.OK}, "status: http.HTTPStatus"),
        (lambda: {"name": np.str_("x")}, "name: numpy.str_"),
        (lambda: {"model": nn.Linear(1, 1)}, "model: torch.nn.modules.linear.Linear; pass its state_dict()"),
        (lambda: {"x": {1, 2}}, "x: builtins.set"),
        (lambda: {"x": b"12"}, "x: builtins.bytes"),
        (lambda: {"x": {b"12": 1}}, "x[b'12']: builtins.bytes"),
        (lambda: {"x": 1j}, "x: builtins.complex"),
        (lambda: {"x": torch.eye(2).to_sparse()}, "x: a Tensor of layout torch.sparse_coo"),
        (lambda: {"x": torch.ones(2, device="meta")}, "x: it is on the meta device"),
        (_cycle, "is nested more than 100 deep"),
        (lambda: [1], "not a list"),
        (
            lambda: "run/step_1",
            'save(state, path) takes a dict as its state, such as {"model": model.state_dict()}, not a str',
        ),
    ],
)
def test_entries_that_cannot_be_saved(value: Callable[[], Any], message: str, tmp_path: Path) -> None:
    """On one rank alone: all ranks raise, and nothing is written."""

    def write(ctx: ParallelContext) -> None:
        save(value() if ctx.rank == 1 else {"x": 1}, tmp_path / "c")

    assert all(message in m for m in errors_on_all_ranks(write, Mesh({"tp": 2})))
    assert os.listdir(tmp_path) == []


def test_a_cut_over_other_ranks(tmp_path: Path) -> None:
    def write(ctx: ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(2, 4, group=ctx.comm("dp"))
        save({"model": layer.state_dict()}, tmp_path / "c")

    assert all("model.weight is sharded over ranks" in m for m in errors_on_all_ranks(write))


def test_files_beside_a_checkpoint_stay(tmp_path: Path) -> None:
    """As the logs that a script writes into the directory before its first save, and between two."""
    (tmp_path / "c/logs").mkdir(parents=True)
    (tmp_path / "c/logs/events.0").write_text("mine")
    for n, mesh in ((1, MESH), (2, Mesh({"tp": 4})), (3, Mesh({"tp": 1}))):
        (tmp_path / f"c/beside_{n}.json").write_text("mine")
        run_ranks(mesh, lambda ctx: save({"x": n}, tmp_path / "c"))  # noqa: B023
        assert run_ranks(mesh, lambda ctx: load(tmp_path / "c")["x"]) == [n] * mesh.size
        ranks = {f"tp_rank_{i}" for i in range(mesh.axes["tp"])}
        beside = {f"beside_{i}.json" for i in range(1, n + 1)}
        assert set(os.listdir(tmp_path / "c")) == {"manifest.json", "logs", *ranks, *beside}
    assert (tmp_path / "c/logs/events.0").read_text() == "mine"
    assert os.listdir(tmp_path) == ["c"]


def test_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("mine")
    assert all(str(tmp_path / "c") in m for m in errors_on_all_ranks(lambda ctx: save({"x": 1}, tmp_path / "c")))
    below = tmp_path / "c" / "d"
    assert all(str(below.parent) in m for m in errors_on_all_ranks(lambda ctx: save({"x": 1}, below)))
    assert (tmp_path / "c").read_text() == "mine"


def test_a_name_that_is_a_link(tmp_path: Path) -> None:
    """The checkpoint it points to is replaced, not the link."""
    saved(tmp_path / "real")
    (tmp_path / "latest").symlink_to("real")
    run_ranks(Mesh({"tp": 1}), lambda ctx: save({"x": 1}, tmp_path / "latest"))
    assert (tmp_path / "latest").is_symlink()
    assert run_ranks(Mesh({"tp": 1}), lambda ctx: load(tmp_path / "real")) == [{"x": 1}]


def test_tensor_is_not_lost(tmp_path: Path) -> None:
    """A stamped tensor whose memory was exchanged for something of another shape."""

    def write(ctx: ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(2, 4)
        layer.weight.data = torch.zeros(1, 1)
        save({"model": layer.state_dict()}, tmp_path / "c")

    assert all("model.weight has shape (1, 1), but" in m for m in errors_on_all_ranks(write))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tp_rank_00", "mine", "saving would replace .* it holds 'tp_rank_00'"),
        ("manifest.json", '{"format": "another", "version": 1}', r"manifest\.json"),  # as a traced model
        ("manifest.json", "no JSON", r"manifest\.json"),
    ],
)
def test_what_has_another_format_is_left_alone(name: str, text: str, said: str, tmp_path: Path) -> None:
    """Saving would take its place, and no checkpoint of this format put it there."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_text(text)
    assert all(re.search(said, m) for m in errors_on_all_ranks(lambda ctx: save({"x": 1}, tmp_path / "c")))
    assert os.listdir(tmp_path) == ["c"]
    assert (tmp_path / "c" / name).read_text() == text


def test_a_traced_model_replaces_no_checkpoint(tmp_path: Path) -> None:
    run_ranks(Mesh({"tp": 2}), lambda ctx: save({"model": {"w": torch.ones(2)}}, tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"of the format 'tpcore\.checkpoint'.*give another name"):
        Staging(str(tmp_path / "c"), "0" * 32, TRACED, {PROGRAMS})
    assert sorted(os.listdir(tmp_path)) == ["c"]
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", "tp_rank_0", "tp_rank_1"]


def test_a_mesh_that_differs_between_ranks_replaces_no_checkpoint(tmp_path: Path) -> None:
    """Two dp ranks to rank 0, two tp ranks to rank 1: what they write together is no checkpoint."""
    run_ranks(Mesh({"tp": 2}), lambda ctx: save({"model": {"w": torch.ones(2)}}, tmp_path / "c"))
    before = (tmp_path / "c" / "manifest.json").read_bytes()

    def rank(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            ctx.world  # noqa: B018  made before the axes change their names
            mesh = Mesh({"dp": 2, "tp": 1})
            mixed = replace(ctx, mesh=mesh)
            mixed._comms[tuple(mesh.axes)] = ctx.world
        else:
            mixed = ctx
        with use(mixed), pytest.raises(CheckpointError, match="but its mesh"):
            save({"model": {"w": torch.ones(2)}}, tmp_path / "c")

    run_ranks(Mesh({"tp": 2}), rank)
    assert (tmp_path / "c" / "manifest.json").read_bytes() == before
