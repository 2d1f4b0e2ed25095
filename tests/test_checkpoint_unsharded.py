"""One unsharded file into a sharded model, of which each rank reads its own part; shards as a plain dict."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from safetensors.torch import save_file
from torch import Tensor, nn

import tpcore
from tpcore.checkpoint import load
from tpcore.checkpoint.read.source import CutRule, read_shards
from tpcore.checkpoint.rewrite import consolidate, reshard
from tpcore.checkpoint.storage import tensorfile
from tpcore.checkpoint.storage.tensorfile import TensorFile
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.layout.shard import Block, ShardSpec
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

pytestmark = [pytest.mark.usefixtures("no_fsync"), pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")]


class Parallel(nn.Module):
    def __init__(self, device: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        options: Any = {"device": device, "dtype": dtype, "pad": True}
        self.embedding = tpcore.ParallelEmbedding(10, 6, **options)
        self.qkv = tpcore.ColumnParallelLinear(6, 18, blocks=3, **options)
        self.out = tpcore.RowParallelLinear(6, 6, **options)
        self.norm = nn.LayerNorm(6, device=device, dtype=dtype)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.qkv = nn.Linear(6, 18)
        self.out = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)


@pytest.fixture
def plain() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Plain().state_dict()


def _check(ctx: ParallelContext, path: Path, full: dict[str, Tensor], rest: Any, device: str | None) -> None:
    for dtype in (torch.float32, torch.float64):
        model = Parallel(device, dtype)
        assert load(path, model, sharded=False) == rest
        for name, spec in tpcore.layers.shard_specs(model).items():
            want = spec.shard(full[name], ctx.coord("tp"), ctx.mesh.axes["tp"]).to(dtype)
            assert torch.equal(model.state_dict()[name], want)


@pytest.mark.parametrize(
    ("form", "device"), [("nested.pt", None), ("flat.pt", "meta"), ("flat.bin", None), ("flat.safetensors", "meta")]
)
def test_into_a_sharded_model(form: str, device: str | None, plain: dict[str, Tensor], tmp_path: Path) -> None:
    path, rest = tmp_path / form, {}
    if form == "flat.safetensors":
        save_file(plain, path)
    elif form == "nested.pt":
        rest = {"epoch": 3, "more": (1, [2])}
        torch.save({"model": plain, **rest}, path)
    else:
        torch.save(plain, path)
    for mesh in ({"tp": 1}, {"dp": 2, "tp": 2}, {"tp": 3}):
        run_ranks(Mesh(mesh), lambda ctx: _check(ctx, path, plain, rest, device))


def test_the_rest_of_a_file_stands_alone(tmp_path: Path) -> None:
    """Tensors that are returned are not windows onto a file that may change."""
    path = tmp_path / "c.pt"
    momentum = torch.ones(3)
    torch.save({"model": nn.Linear(1, 1).state_dict(), "optimizer": {"state": {0: (momentum,)}}}, path)
    (rest,) = run_ranks(Mesh({"tp": 1}), lambda ctx: load(path, nn.Linear(1, 1), sharded=False))
    with path.open("r+b") as f:
        f.write(b"\xff" * path.stat().st_size)
    assert torch.equal(rest["optimizer"]["state"][0][0], momentum)


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


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
    ],
)
def test_files_that_are_none(name: str, data: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    _refused(path, message)
    os.mkdir(tmp_path / "dir")
    _refused(tmp_path / "dir", "is a directory")


def _refused(path: Path, message: str) -> None:
    def read(ctx: ParallelContext) -> None:
        model = Parallel()
        with pytest.raises(CheckpointError, match=message) as caught:
            load(path, model, sharded=False)
        assert str(path) in str(caught.value)

    run_ranks(Mesh({"tp": 2}), read)


@pytest.mark.parametrize("what", ["code", "list", "no model", "short", "key"])
def test_torch_files_that_do_not_serve(
    what: str, plain: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.pt"
    holds: dict[str, tuple[Any, str]] = {
        "code": ({"model": plain, "x": _Bomb()}, "unpickling that could run code"),
        "list": ([1, 2], "holds a list"),
        "no model": ({"net": plain}, "no model under 'model'"),
        "key": ({"model": {**plain, 3: torch.ones(1)}}, "names, not 3"),
        "short": (plain, "is truncated"),
    }
    torch.save(holds[what][0], path)
    if what == "short":
        os.truncate(path, path.stat().st_size - 100)
    _refused(path, holds[what][1])
    assert not os.path.exists("exploded")


def test_misfits(plain: dict[str, Tensor], tmp_path: Path) -> None:
    del plain["out.bias"]
    plain["qkv.weight"] = torch.zeros(9, 6)
    plain["other"] = torch.zeros(2)
    save_file(plain, tmp_path / "c.safetensors")
    _refused(
        tmp_path / "c.safetensors",
        r"(?s)'qkv.weight': the checkpoint has shape \(9, 6\), the model \(18, 6\), of which this rank "
        r"holds \(9, 6\)"
        r".*'out.bias': the model has shape \(6,\).*'other': the checkpoint has shape \(2,\)",
    )


def test_old_torch_says_that_it_is_not_safe(
    plain: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.pt"
    torch.save(plain, path)

    def read(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            with pytest.warns(UserWarning, match=r"c\.pt is a pickle.*CVE-2026-24747.*safetensors") as caught:
                load(path, Parallel(), sharded=False)
            assert len(caught) == 1
        else:
            load(path, Parallel(), sharded=False)

    for version in ("2.9.1+cpu", "2.5.0"):
        monkeypatch.setattr(torch, "__version__", version)
        run_ranks(Mesh({"tp": 2}), read)
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git12")
    run_ranks(Mesh({"tp": 1}), lambda ctx: load(path, Parallel(), sharded=False))


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

    def status(name: str, file: str) -> int:
        line = next(line for line in Path(f"/proc/self/{file}").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    read, peak = status("rchar:", "io"), status("VmHWM:", "status")
    load(path, model, sharded=False)
    read, peak = status("rchar:", "io") - read, (status("VmHWM:", "status") - peak) * 1024
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
        consolidate(path, tmp_path / "out")


# -- one rank's shards, without ranks or a model -----------------------------------------------------------
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
