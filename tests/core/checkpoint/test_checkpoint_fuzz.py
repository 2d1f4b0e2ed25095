"""Damaged files, mutated or made to hold up or fill the reader: an error that names the file, never a wrong tensor."""

from __future__ import annotations

import json
import os
import random
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import deep, refit, values
from safetensors.torch import save_file
from torch import nn

import tpcore
from tpcore.checkpoint import load, save
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.testing import run_ranks

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning", "ignore::DeprecationWarning"),
]
COUNTS = pytest.mark.parametrize(
    "count", [100, pytest.param(500, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.drill)]
)
HUGE = [b"99999999999", b"-1", b"null", b"NaN", b"[]", b"1e400", b'"../../x"', b"18446744073709551615", b"{"]


def mutated(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at, kind = draw.randrange(len(out) or 1), draw.randrange(6)
        if kind == 0 and out:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            out[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif kind == 3:
            del out[at : at + draw.randrange(1, 9)]
        elif kind == 4:
            out[at : at + draw.randrange(9)] = draw.choice(HUGE)
        elif out:
            other = draw.randrange(len(out))
            out[at : at + 8] = out[other : other + 8]
    return bytes(out)


def in_several_files(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Each tensor in a file of its own; the index that names them."""
    folder.mkdir()
    for i, (name, t) in enumerate(weights.items()):
        save_file({name: t}, folder / f"model-{i}.safetensors")
    index = folder / "model.safetensors.index.json"
    files = {name: f"model-{i}.safetensors" for i, name in enumerate(weights)}
    index.write_text(json.dumps({"weight_map": files}))
    return index


@pytest.fixture
def bounded() -> Iterator[None]:
    """No more memory than 256 MB beyond what is there."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


@COUNTS
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("bounded")
def test_mutated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)

    def one(ctx: object) -> None:
        torch.manual_seed(0)
        model = nn.ModuleList([tpcore.ColumnParallelLinear(3, 4, blocks=2), nn.Linear(2, 3)])
        save({"model": model.state_dict(), "epoch": 1}, tmp_path / "c")

    run_ranks(Mesh({"tp": 2}), one)
    want = values(tmp_path / "c")
    index = in_several_files(want, tmp_path / "hf")
    files = sorted(p for p in (tmp_path / "c").rglob("*") if p.is_file())
    draw = random.Random(0)
    refused = 0
    for i in range(count):
        target = index if i % 10 == 0 else draw.choice(files)
        original, sums = target.read_bytes(), (tmp_path / "c" / "manifest.json").read_bytes()
        target.write_bytes(mutated(original, draw))
        if i % 3 == 2 and target != index:
            refit(tmp_path / "c", target.relative_to(tmp_path / "c").as_posix())
        try:
            for name, t in values(target.parent if target == index else tmp_path / "c").items():
                assert name in want or target != index
                if name in want:
                    assert torch.equal(t, want[name]), (i, target, name)
        except CheckpointError:
            refused += 1
        finally:
            (tmp_path / "c" / "manifest.json").write_bytes(sums)
            target.write_bytes(original)
    assert refused > count // 2
    assert json.loads(index.read_text())["weight_map"].keys() == want.keys()


# -- made on purpose ----------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    state = {"model": tpcore_state(), "epoch": 1}
    run_ranks(Mesh({"tp": 1}), lambda ctx: save(state, tmp_path / "c"))
    return tmp_path / "c"


def tpcore_state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).view(2, 3)}


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
        refit(saved, "manifest.json", lambda top: top["files"][name].update(bytes=0))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        values(saved, quiet=True)


@pytest.mark.parametrize("how", [fifo, device])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-0.safetensors", "w.pt"])
def test_special_files_of_other_forms(tmp_path: Path, name: str, how: Callable[[Path], None]) -> None:
    weights = {"a": torch.ones(100), "b": torch.ones(100)}
    torch.save({"model": weights}, tmp_path / "w.pt")
    in_several_files(weights, tmp_path / "hf")
    path = (tmp_path if name == "w.pt" else tmp_path / "hf") / name
    how(path)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        values(path if name == "w.pt" else tmp_path / "hf", quiet=True)


STATE = "tp_rank_0/state.json"


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
def test_pickles_that_make_much_of_little(tmp_path: Path, what: str) -> None:
    refused_for_its_size(tmp_path / "w.pt", tmp_path / "w.pt", what)


def refused_for_its_size(path: Path, opened: Path, what: str) -> None:
    made, message = BESIDE[what]
    torch.save({"model": tpcore_state(), "extra": made()}, path)
    with pytest.raises(CheckpointError, match=message):
        values(opened, quiet=True)


@pytest.mark.parametrize("inside", ["tp_rank_0", "tp_rank_0/x/y"])
def test_a_save_into_a_part_of_a_checkpoint_is_refused(saved: Path, inside: str) -> None:
    with pytest.raises(CheckpointError, match=r"is inside of the checkpoint .*/c, in its tp_rank_0"):
        run_ranks(Mesh({"tp": 1}), lambda ctx: save({"model": tpcore_state()}, saved / inside))
    assert torch.equal(values(saved)["w"], tpcore_state()["w"])
    run_ranks(Mesh({"tp": 1}), lambda ctx: save({"model": tpcore_state()}, saved / "later"))
    assert torch.equal(values(saved / "later")["w"], tpcore_state()["w"])


@pytest.mark.parametrize("names", [[["w"]], [7], [None]])
def test_names_of_an_optimizer_that_are_no_text(saved: Path, names: list[Any]) -> None:
    def rank(ctx: Any) -> None:
        model = tpcore.ColumnParallelLinear(2, 2, bias=False)
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        refit(saved, STATE, lambda top: names_of(top["state"]))
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
        values(tmp_path, quiet=True)
