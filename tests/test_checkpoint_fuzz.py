"""Mutated checkpoint files: an error or the right tensors, never a wrong one.

``TPCORE_FUZZ=10000 pytest tests/test_checkpoint_fuzz.py`` is the long run; the default is 1,000 files.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import tpcore
from tpcore.checkpoint import rewriting, save
from tpcore.checkpoint.source import opened, part
from tpcore.checkpoint.unsharded import Reading
from tpcore.errors import CheckpointError
from tpcore.mesh import Mesh
from tpcore.testing import run_ranks

COUNT = int(os.environ.get("TPCORE_FUZZ", "1000"))
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


@pytest.mark.slow
@pytest.mark.timeout(60 + COUNT)
def test_mutated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)

    def one(ctx: object) -> None:
        torch.manual_seed(0)
        model = nn.ModuleList([tpcore.ColumnParallelLinear(3, 4, stride=2), nn.Linear(2, 3)])
        save({"model": model.state_dict(), "epoch": 1}, tmp_path / "c")

    run_ranks(Mesh({"tp": 2}), one)
    rewriting.consolidate(tmp_path / "c", tmp_path / "hf", max_shard_size=64)
    with opened(tmp_path / "c", Reading()) as source:
        want = {name: part(stored, 0, 1) for name, stored in source.tensors()}
    files = sorted(p for p in (tmp_path / "c").rglob("*") if p.is_file())
    index = tmp_path / "hf" / "model.safetensors.index.json"
    draw = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for i in range(COUNT):
        target = index if i % 10 == 0 else draw.choice(files)
        original = target.read_bytes()
        target.write_bytes(mutated(original, draw))
        try:
            with opened(target.parent if target == index else tmp_path / "c", Reading()) as source:
                found = {name: part(stored, 0, 1) for name, stored in source.tensors()}
            for name, t in found.items():
                assert name in want or target != index
                if name in want:
                    assert torch.equal(t, want[name]), (i, target, name)
        except CheckpointError:
            refused += 1
        finally:
            target.write_bytes(original)
    assert refused > COUNT // 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB
    shutil.rmtree(tmp_path / "c")
    assert json.loads(index.read_text())["weight_map"].keys() == want.keys()
