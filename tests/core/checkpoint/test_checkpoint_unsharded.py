"""Of an unsharded file each rank reads its own part, in little memory; files that are refused; shards as a dict."""

from __future__ import annotations

import gc
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import SPECS, WANTED, Bomb, Net, assert_parts, full, values
from helpers.rank_pool import RankPool
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import tpcore
from tpcore.checkpoint import load
from tpcore.checkpoint.read.source import read_shards
from tpcore.checkpoint.storage import tensorfile
from tpcore.checkpoint.storage.tensorfile import TensorFile
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

pytestmark = [pytest.mark.usefixtures("no_fsync"), pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")]


def test_the_rest_of_a_file_stands_alone(tmp_path: Path) -> None:
    """Tensors that are returned are not windows onto a file that may change."""
    path = tmp_path / "c.pt"
    momentum = torch.ones(3)
    torch.save({"model": nn.Linear(1, 1).state_dict(), "optimizer": {"state": {0: (momentum,)}}}, path)
    (rest,) = run_ranks(Mesh({"tp": 1}), lambda ctx: load(path, nn.Linear(1, 1), sharded=False))
    with path.open("r+b") as f:
        f.write(b"\xff" * path.stat().st_size)
    assert torch.equal(rest["optimizer"]["state"][0][0], momentum)


def header(entry: dict[str, Any], length: int | None = None) -> bytes:
    """A file of 48 bytes of values, whose header lies."""
    head = json.dumps({"a.weight": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]} | entry}).encode()
    return (length or len(head)).to_bytes(8, "little") + head + bytes(48)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("c.pt", None, "does not exist"),
        ("c.pt", b"", "neither a .safetensors file nor"),
        ("c.pt", b"PK\x03\x04 and so on", "is truncated"),
        ("c.pt", pickle.dumps({"a": 1}), "before 1.6"),
        ("c.safetensors", b"", "not a whole safetensors file"),
        ("c.safetensors", b"\x08\0\0\0\0\0\0\0{'a': 1}", "not a whole safetensors file"),
        ("c.safetensors", (1 << 40).to_bytes(8, "little") + b"{}", "not a whole safetensors file"),
        ("c.safetensors", header({"data_offsets": [0, 400]}), "not a whole safetensors file"),
        ("c.safetensors", header({"shape": [1 << 40, 1 << 40]}), "not a whole safetensors file"),
        ("c.safetensors", header({"dtype": "F64"}), "not a whole safetensors file"),
        ("c.safetensors", header({"dtype": "F999"}), "not a whole safetensors file"),
        ("c.safetensors", header({}, 1 << 50), "not a whole safetensors file"),  # which is not even read
        ("c.safetensors", header({}, 7), "not a whole safetensors file"),
    ],
)
def test_files_that_are_none(name: str, data: bytes | None, message: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    _refused(tmp_path / name, message)


def _refused(path: Path, message: str) -> None:
    def read(ctx: ParallelContext) -> None:
        model = Net()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=message) as caught:
            load(path, model, sharded=False)
        assert str(path) in str(caught.value)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

    run_ranks(Mesh({"tp": 2}), read)


def test_one_file_counts_before_an_index(tmp_path: Path) -> None:
    """As in transformers, whose ``save_pretrained`` leaves the index of an earlier save of several files."""
    save_file({"weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "model-00001.safetensors"}})
    )

    def read(_: ParallelContext) -> None:
        layer = tpcore.ColumnParallelLinear(4, 4, bias=False)
        load(tmp_path, layer, sharded=False)
        assert torch.equal(layer.weight, torch.ones(2, 4))

    run_ranks(Mesh({"tp": 2}), read)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    _refused(tmp_path, "is a directory without model.safetensors")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"model": full(), "x": Bomb()}, "unpickling that could run code"),
        ([1, 2], "holds a list"),
        ({"net": full()}, r"no model under 'model'.*: give a model_key of \['net'\]"),
        ({"model": {**full(), 3: torch.ones(1)}}, "names, not 3"),
        (None, "is truncated"),
    ],
)
def test_torch_files_that_do_not_serve(
    held: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.pt"
    torch.save(held or full(), path)
    if held is None:
        os.truncate(path, path.stat().st_size - 100)
    _refused(path, message)
    assert not os.path.exists("exploded")


def test_old_torch_says_that_it_is_not_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.pt"
    torch.save(full(), path)

    def read(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            with pytest.warns(UserWarning, match=r"c\.pt is a pickle.*CVE-2026-24747.*safetensors") as caught:
                load(path, Net(), sharded=False)
            assert len(caught) == 1
        else:
            load(path, Net(), sharded=False)

    for version in ("2.9.1+cpu", "2.5.0"):
        monkeypatch.setattr(torch, "__version__", version)
        run_ranks(Mesh({"tp": 2}), read)
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git12")
    run_ranks(Mesh({"tp": 1}), lambda ctx: load(path, Net(), sharded=False))


# -- reading in part ----------------------------------------------------------------------------------------
@given(st.data(), st.lists(st.integers(1, 5), max_size=4), st.integers(1, 64))
@settings(max_examples=150, deadline=None)
def test_any_region(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: list[int], chunk: int
) -> None:
    """Whatever way the bytes of a region come in, it is that region. Small chunks: all ways occur."""
    path = tmp_path_factory.mktemp("region") / "t.safetensors"
    t = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    save_file({"other": torch.zeros(3), "t": t}, path)
    starts = [data.draw(st.integers(0, s - 1)) for s in shape]
    size = [data.draw(st.integers(0, s - a)) for s, a in zip(shape, starts, strict=True)]
    box = t[tuple(slice(a, a + s) for a, s in zip(starts, size, strict=True))]
    dtype, step = data.draw(st.sampled_from([(torch.int16, 1), (torch.float32, 1), (torch.int16, 2)]))
    out = torch.full([s * step for s in size], -1, dtype=dtype)[(slice(None, None, step),) * len(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "CHUNK", 2 * chunk)
        file = TensorFile(str(path))
        try:
            file.tensor("t").read(starts, out, check=True)
        finally:
            file.close()
    assert torch.equal(out, box.to(dtype))


ROWS, COLUMNS = 4096, 4096  # float32: 64 MiB each of two tensors
MiB = 2**20


def status(name: str, file: str = "status") -> int:
    """A number that the system counts of this process."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def grown(run: Callable[[], object]) -> int:
    """By how many bytes the peak of resident memory is above what was resident before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = status("VmRSS:")
    run()
    return (status("VmHWM:") - before) * 1024


class Large(nn.Module):
    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.a = tpcore.ColumnParallelLinear(COLUMNS, ROWS, bias=False, device=device)
        self.b = tpcore.RowParallelLinear(COLUMNS * 8, ROWS // 8, bias=False, device=device)


def _load_measured(ctx: ParallelContext, path: str, device: str | None) -> tuple[int, int]:
    """(bytes that went through read calls, growth of the peak of memory), in a process of its own."""
    model = Large(device)
    if device is None:
        for p in model.parameters():
            p.detach().fill_(1)  # present before we count

    before = status("rchar:", "io")
    peak = grown(lambda: load(path, model, sharded=False))
    read = status("rchar:", "io") - before
    assert float(model.a.weight.detach()[0, 0]) == 1024.0 * ctx.coord("tp")
    assert float(model.b.weight.detach()[0, 0]) == 8192.0 * ctx.coord("tp")
    return read, peak


@pytest.mark.parametrize(("form", "device"), [("c.safetensors", None), ("c.safetensors", "meta"), ("c.pt", "meta")])
def test_a_large_file_is_not_read_whole(form: str, device: str | None, pool: RankPool, tmp_path: Path) -> None:
    """At tp=4 a rank takes 32 of 128 MiB: its memory grows by that if it had none, and hardly if it had."""
    a = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, COLUMNS).contiguous()
    b = torch.arange(COLUMNS * 8, dtype=torch.float32)[None].expand(ROWS // 8, COLUMNS * 8).contiguous()
    state = {"a.weight": a, "b.weight": b}
    if form == "c.pt":
        torch.save(state, tmp_path / form)
    else:
        save_file(state, tmp_path / form)
    del a, b, state
    shard = 32 * MiB
    for read, peak in pool.run(Mesh({"tp": 4}), _load_measured, str(tmp_path / form), device):
        # pages of the file, which the system may drop: a quarter of a, and all of b, which is cut in each row
        mapped = 80 * MiB if form == "c.pt" else 0
        own = shard if device == "meta" else 0
        assert peak < own + mapped + 20 * MiB  # two chunks of 8 MiB, and what Python needs
        if form == "c.safetensors":
            assert read < shard + MiB


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    """torch maps the compressed bytes as values."""
    path = tmp_path / "c.pt"
    torch.save({"model": {"w": torch.arange(64.0)}}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    assert torch.equal(torch.load(path)["model"]["w"], torch.arange(64.0))
    with pytest.raises(CheckpointError, match=r"c\.pt has compressed records.*torch\.save"):
        values(path)


# -- one rank's shards, without ranks or a model -----------------------------------------------------------
@pytest.mark.parametrize("values", [full(), {"model": full(), "epoch": 3}])
def test_shards_of_values_in_memory(values: dict[str, Any]) -> None:
    for rank, n in ((0, 1), (1, 2), (3, 4)):
        assert_parts(read_shards(values, WANTED, rank, n), rank, n)


def test_floats_are_converted_and_memory_is_its_own() -> None:
    values = full()
    assert_parts(read_shards(values, {n: (s, torch.bfloat16) for n, s in SPECS.items()}, 0, 1), 0, 1, torch.bfloat16)
    read_shards(values, WANTED, 0, 1)["norm.weight"].zero_()
    assert torch.equal(values["norm.weight"], full()["norm.weight"])


def test_names_of_tied_values() -> None:
    """A weight that is stored under another of its names, or under both."""
    ties, values = {"head.weight": "up.weight"}, full()
    values["head.weight"] = values.pop("up.weight")
    assert_parts(read_shards(values, WANTED, 1, 2, ties=ties), 1, 2)
    both = {**full(), "head.weight": full()["up.weight"]}
    assert_parts(read_shards(both, WANTED, 1, 2, ties=ties), 1, 2)
    with pytest.raises(CheckpointError, match=r"'up.weight' and 'head.weight' are one tensor in the model"):
        read_shards({**full(), "head.weight": torch.ones(8, 4)}, WANTED, 1, 2, ties=ties)


def test_what_does_not_fit(tmp_path: Path) -> None:
    values = full()
    values["norm.weight"] = torch.ones(5)
    values["up.weight"] = torch.ones(8, 4, dtype=torch.int64)
    values["more"] = values.pop("down.weight")
    save_file(values, tmp_path / "w.safetensors")
    for there in (values, tmp_path / "w.safetensors"):
        with pytest.raises(CheckpointError) as caught:
            read_shards(there, WANTED, 0, 2)
        assert str(caught.value).splitlines()[1:] == [
            "  'up.weight': the checkpoint has dtype torch.int64, the model torch.float32",
            "  'down.weight': the model has shape (4, 8), the checkpoint nothing",
            "  'norm.weight': the checkpoint has shape (5,), the model (4,)",
            "  'more': the checkpoint has it, the model not",
        ]
    with pytest.raises(CheckpointError, match="does not exist"):
        read_shards(tmp_path / "none", WANTED, 0, 2)
