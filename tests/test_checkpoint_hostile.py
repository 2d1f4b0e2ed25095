"""Directories that somebody made to hold up or fill the reader: one error that names the file."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tpcore
from tpcore.checkpoint import load, save
from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.offline.consolidate import consolidate
from tpcore.checkpoint.offline.inspect import verify
from tpcore.checkpoint.read.source import opened, part, tensors_of
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.testing import run_ranks

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    state = {"model": tpcore_state(), "epoch": 1, "when": (1, 2), "by": {3: "x"}}
    run_ranks(Mesh({"tp": 1}), lambda ctx: save(state, tmp_path / "c"))
    return tmp_path / "c"


def tpcore_state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).view(2, 3)}


def read(path: Path) -> None:
    with opened(path, Reading(quiet=True)) as source:
        for stored in tensors_of(source).values():
            part(stored, 0, 1)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("r+b") as f:
        f.truncate(3 << 30)


@pytest.mark.parametrize("how", [fifo, device, huge])
@pytest.mark.parametrize("name", ["manifest.json", "tp_rank_0/state.json", "tp_rank_0/model.safetensors"])
def test_special_files_of_a_checkpoint(saved: Path, name: str, how: Callable[[Path], None]) -> None:
    how(saved / name)
    if how is fifo and name != "manifest.json":  # so that its size is no reason
        refit(saved, lambda top: top["files"][name].update(bytes=0))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        read(saved)
    assert any(name in problem for problem in verify(saved))


@pytest.mark.parametrize("how", [fifo, device])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "w.pt"])
def test_special_files_of_other_forms(tmp_path: Path, name: str, how: Callable[[Path], None]) -> None:
    torch.save({"model": {"a": torch.ones(100), "b": torch.ones(100)}}, tmp_path / "w.pt")
    consolidate(tmp_path / "w.pt", tmp_path / "hf", max_shard_size=500)
    path = (tmp_path if name == "w.pt" else tmp_path / "hf") / name
    how(path)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        read(path if name == "w.pt" else tmp_path / "hf")


def refit(folder: Path, change: Callable[[Any], object], file: str = "manifest.json") -> None:
    """Change a file of JSON, and the sums of it that are on record."""
    path, manifest = folder / file, folder / "manifest.json"
    top = json.loads(path.read_text())
    change(top)
    text = json.dumps(top).replace('"1e400"', "1e400").encode()
    path.write_bytes(text)
    if file != "manifest.json":
        whole = json.loads(manifest.read_text())
        whole["files"][file] = {"bytes": len(text), "crc32": f"{zlib.crc32(text):08x}"}
        manifest.write_text(json.dumps(whole))


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def record(top: Any) -> Any:
    (records,) = top["tensors"].values()
    return records["w"] if "w" in records else next(iter(records.values()))


STATE = "tp_rank_0/state.json"
WRONG: dict[str, tuple[str, Callable[[Any], object]]] = {
    "unit": (STATE, lambda top: record(top).update(spec={"shape": [2, 3], "dim": 0, "blocks": [[2, 0, 0]]})),
    "blocks": (STATE, lambda top: record(top).update(spec={"shape": [2, 3], "dim": 0, "blocks": [[0, 1, 0]] * 10**5})),
    "infinite": (STATE, lambda top: record(top).update(shape=["1e400", 3])),
    "deep": (STATE, lambda top: top["state"].update(epoch=deep(900))),
    "no items": (STATE, lambda top: top["state"].update(when={"$": "tuple"})),
    "items of one": (STATE, lambda top: top["state"].update(by={"$": "dict", "items": [[1], 2]})),
    "items a number": (STATE, lambda top: top["state"].update(by={"$": "dict", "items": 7})),
    "a dtype": (STATE, lambda top: top["state"].update(by={"$": "dtype", "value": "load"})),
    "a dtype of a tensor": (STATE, lambda top: record(top).update(dtype="load")),
    "no dict": (STATE, lambda top: top.update(state=[1])),
    "key a list": (STATE, lambda top: top["state"].update(by={"$": "dict", "items": [[[1], 2]]})),
    "half a character": ("manifest.json", lambda top: top["files"].update({"\ud800": {}})),
    "written by": ("manifest.json", lambda top: top.update(written_by=[[1, 2, 3]])),
    "mesh": ("manifest.json", lambda top: top["mesh"].update(tp=10**8)),
    "mesh of pp": ("manifest.json", lambda top: top["mesh"].update(pp=10**8)),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_json_with_right_sums(saved: Path, what: str) -> None:
    file, change = WRONG[what]
    refit(saved, change, file)
    with pytest.raises(CheckpointError, match=re.escape(file)):
        run_ranks(Mesh({"tp": 1}), lambda ctx: load(saved))


@pytest.mark.parametrize("how", [fifo, device])
def test_special_files_beside_weights(tmp_path: Path, how: Callable[[Path], None]) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").touch()
    how(tmp_path / "config.json")
    assert verify(tmp_path) == []


def shared_lists() -> Any:
    value: Any = 1
    for _ in range(32):
        value = [value, value]
    return value


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def views() -> list[torch.Tensor]:
    whole = torch.zeros(1 << 20)
    return [whole.view(1 << 20) for _ in range(2000)]


BESIDE: dict[str, tuple[Callable[[], Any], str]] = {
    "shared lists": (shared_lists, r"repeats what it holds to \d{10} items"),
    "shared dicts": (lambda: {"a": shared_lists()}, r"repeats what it holds to \d{10} items"),
    "expanded": (lambda: torch.zeros(1).expand(1 << 30), "repeats 4 bytes to 4294967296"),
    "views": (views, "repeats what it holds to"),
    "deep": (lambda: deep(200), "nested more than 100 deep"),
    "itself": (itself, "holds itself"),
}


@pytest.mark.parametrize("what", BESIDE)
@pytest.mark.parametrize("form", ["whole", "shards"])
def test_pickles_that_make_much_of_little(tmp_path: Path, what: str, form: str) -> None:
    made, message = BESIDE[what]
    state = {"model": tpcore_state(), "extra": made()}
    path = tmp_path / "w.pt"
    if form == "shards":
        path = tmp_path / "c" / "tp_rank_0" / "checkpoint.pt"
        path.parent.mkdir(parents=True)
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=message):
        read(path if form == "whole" else tmp_path / "c")


@pytest.mark.parametrize("inside", ["tp_rank_0", "tp_rank_0/x/y"])
def test_a_save_into_a_part_of_a_checkpoint_is_refused(saved: Path, inside: str) -> None:
    with pytest.raises(CheckpointError, match=r"is inside of the checkpoint .*/c, in its tp_rank_0"):
        run_ranks(Mesh({"tp": 1}), lambda ctx: save({"model": tpcore_state()}, saved / inside))
    assert verify(saved) == []
    run_ranks(Mesh({"tp": 1}), lambda ctx: save({"model": tpcore_state()}, saved / "later"))
    assert verify(saved / "later") == []


@pytest.mark.parametrize("names", [[["w"]], [7], [None]])
def test_names_of_an_optimizer_that_are_no_text(saved: Path, names: list[Any]) -> None:
    def rank(ctx: Any) -> None:
        model = tpcore.ColumnParallelLinear(2, 2, bias=False)
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        refit(saved, lambda top: names_of(top["state"]), "tp_rank_0/state.json")
        with pytest.raises(CheckpointError, match="param_groups name parameter 0"):
            load(saved, model, optimizer=optimizer)

    def names_of(tree: Any) -> None:
        tree["optimizer"]["param_groups"][0]["param_names"] = names

    run_ranks(Mesh({"tp": 1}), rank)


def test_a_sparse_file_larger_than_the_address_space_takes(tmp_path: Path) -> None:
    size = 1 << 40
    header = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        try:
            f.truncate(8 + len(text) + size)
        except OSError:
            pytest.skip("this file system has no files of that size")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read(tmp_path)
