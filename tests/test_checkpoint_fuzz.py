"""Mutated checkpoint files: an error or the right tensors, never a wrong one."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tpcore
from tpcore.checkpoint import save
from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.offline.consolidate import consolidate
from tpcore.checkpoint.offline.inspect import verify
from tpcore.checkpoint.read.source import CutRule, opened, part, tensors_of
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.testing import run_ranks

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


def special(path: Path, others: list[Path], draw: random.Random) -> None:
    """What is no file of these bytes: a pipe, a device, a hole of 3 GB, deep JSON, the file of another."""
    kind, other = draw.randrange(5), draw.choice(others).read_bytes()
    path.unlink()
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.touch()
        os.truncate(path, 3 << 30)
    elif kind == 3:
        path.write_text("[" * 900 + "]" * 900)
    else:
        path.write_bytes(other)


def refit(path: Path, folder: Path) -> None:
    """Put the sums of a file on record, as they are now."""
    manifest, name = folder / "manifest.json", path.relative_to(folder).as_posix()
    top = json.loads(manifest.read_text())
    if name in top["files"]:
        data = path.read_bytes()
        top["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        manifest.write_text(json.dumps(top))


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
    consolidate(tmp_path / "c", tmp_path / "hf", max_shard_size=64)
    with opened(tmp_path / "c", Reading()) as source:
        want = {name: part(stored, 0, 1) for name, stored in tensors_of(source).items()}
    files = sorted(p for p in (tmp_path / "c").rglob("*") if p.is_file())
    index = tmp_path / "hf" / "model.safetensors.index.json"
    draw = random.Random(0)
    refused = 0
    for i in range(count):
        target = index if i % 10 == 0 else draw.choice(files)
        original, sums = target.read_bytes(), (tmp_path / "c" / "manifest.json").read_bytes()
        if i % 8 == 7:
            special(target, files, draw)
        else:
            target.write_bytes(mutated(original, draw))
            if i % 3 == 2 and target != index and target.name != "manifest.json":
                refit(target, tmp_path / "c")
        try:
            with opened(target.parent if target == index else tmp_path / "c", Reading()) as source:
                found = {name: part(stored, 0, 1) for name, stored in tensors_of(source).items()}
            for name, t in found.items():
                assert name in want or target != index
                if name in want:
                    assert torch.equal(t, want[name]), (i, target, name)
        except CheckpointError:
            refused += 1
        finally:
            target.unlink()
            (tmp_path / "c" / "manifest.json").write_bytes(sums)
            target.write_bytes(original)
    assert refused > count // 2
    shutil.rmtree(tmp_path / "c")
    assert json.loads(index.read_text())["weight_map"].keys() == want.keys()


@COUNTS
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("bounded")
def test_mutated_pickles(tmp_path: Path, count: int) -> None:
    """Whole files and shards of another library. What ``verify`` finds nothing wrong with is right.

    Loading alone cannot tell: torch does not compare its checksums, and a rank reads its part only.
    """
    g = torch.Generator().manual_seed(0)
    want = {f"{i}.weight": torch.randn(4, 3, generator=g) for i in range(3)}
    torch.save({"model": want, "epoch": 1}, tmp_path / "whole.pt")
    for rank in range(2):
        (tmp_path / "c" / f"tp_rank_{rank}").mkdir(parents=True)
        state = {name: t.chunk(2)[rank].clone() for name, t in want.items()}
        torch.save({"model": state}, tmp_path / "c" / f"tp_rank_{rank}" / "checkpoint.pt")
    files = sorted(tmp_path.rglob("*.pt"))
    rules = [CutRule("*", 0)]
    draw = random.Random(1)
    refused = 0
    for i in range(count // 2):
        target = draw.choice(files)
        path = target if target.parent == tmp_path else tmp_path / "c"
        original = target.read_bytes()
        # in place: what is mapped by then would fault, as with any file that is cut while it is read
        target.unlink()
        target.write_bytes(mutated(original, draw))
        try:
            with opened(path, Reading(), rules if path.is_dir() else []) as source:
                found = {name: part(stored, 0, 1) for name, stored in tensors_of(source, rules).items()}
            if not verify(path, rules=rules if path.is_dir() else []):
                assert all(torch.equal(found[name], t) for name, t in want.items()), (i, target)
            else:
                refused += 1
        except CheckpointError:
            refused += 1
        finally:
            target.unlink()
            target.write_bytes(original)
    assert refused > count // 4


@pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")
def test_a_tensor_of_little_memory_and_large_shape(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "w.pt")
    (said,) = verify(tmp_path / "w.pt")
    assert "'w' repeats 4 bytes to 4398046511104" in said
