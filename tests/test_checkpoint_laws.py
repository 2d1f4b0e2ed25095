"""Written at one degree, rewritten at others and back: the same bits. And a disk that takes no more."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpcore.checkpoint.format.manifest import FORMAT
from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.offline.consolidate import consolidate
from tpcore.checkpoint.offline.reshard import reshard
from tpcore.checkpoint.read.source import cuts_by, opened, part, tensors_of
from tpcore.checkpoint.storage.publish import Staging
from tpcore.checkpoint.tensors import stored as reading
from tpcore.checkpoint.write.save import put_in_place, write_state, write_tensor_files
from tpcore.checkpoint.write.snapshot import Part
from tpcore.layout.layout import Layout
from tpcore.layout.shard import Block, ShardSpec

DEGREES = st.integers(1, 8)


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    """Uncut, one block or fused ones, in units, of uneven sizes; or kv heads with copies."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    if not shape or draw(st.booleans()):
        return ShardSpec(tuple(shape))
    dim = draw(st.integers(0, len(shape) - 1))
    # one head, of which every rank has a copy
    if draw(st.integers(0, 3)) == 0:
        unit = draw(st.integers(1, 3))
        blocks: tuple[Block, ...] = (Block(unit, unit, True),)
    else:
        blocks = tuple(
            Block(units * unit, unit)
            for units, unit in draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=3))
        )
    shape[dim] = sum(b.size for b in blocks)
    return ShardSpec(tuple(shape), dim, blocks)


def write(path: Path, full: dict[str, Tensor], cuts: dict[str, ShardSpec], n: int) -> None:
    """What ``save`` writes on ``n`` ranks, without ranks. The first tensor is tied to another name."""
    staging = Staging(str(path), "0" * 32, FORMAT)
    files = {}
    for rank in range(n):
        model = {name: cuts[name].shard(t, rank, n) for name, t in full.items()}
        by_id = {id(t): Layout.of(cuts[name], "tp") for name, t in model.items()}
        model["tied"] = model["0"]
        done = Part({"model": model, "epoch": 3}, lambda t, where, c=by_id: c.get(id(t)))  # type: ignore[misc]
        name = f"tp_rank_{rank}"
        records, tensors = write_tensor_files(staging.path, name, "0" * 32, done.files)
        files |= records | write_state(staging.path, name, "0" * 32, tensors, done.tree)
    put_in_place(staging, "0" * 32, {"tp": n}, files)
    staging.close()


def states(path: Path) -> list[dict[str, Tensor]]:
    """Every rank's shards."""
    with opened(path, Reading()) as source:
        found = []
        for rank in range(source.tp):
            model = source.stage(0, rank, cuts_by(())).model()
            found.append({k: part(stored, rank, source.tp) for k, stored in model.items()})
        return found


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(specs(), min_size=1, max_size=4), DEGREES, DEGREES, DEGREES, st.sampled_from([1, 24, 8 << 20]))
def test_any_degree_into_any(drawn: list[ShardSpec], a: int, b: int, c: int, chunk: int) -> None:
    """``chunk``: bytes that are made and written at once."""
    cuts = {str(i): spec for i, spec in enumerate(drawn)}
    g = torch.Generator().manual_seed(0)
    full = {name: torch.randn(spec.shape, generator=g) for name, spec in cuts.items()}
    fsync, os.fsync = os.fsync, lambda fd: None
    before, reading.CHUNK = reading.CHUNK, chunk  # type: ignore[attr-defined]
    try:
        with tempfile.TemporaryDirectory() as home:
            write(Path(home, "0"), full, cuts, a)
            for step, n in enumerate((b, c, a)):
                reshard(Path(home, str(step)), Path(home, str(step + 1)), n)
                for rank, state in enumerate(states(Path(home, str(step + 1)))):
                    for name, spec in cuts.items():
                        assert torch.equal(state[name], spec.shard(full[name], rank, n))
                    assert torch.equal(state["tied"], state["0"])
            consolidate(Path(home, "3"), Path(home, "whole"))
            with opened(Path(home, "whole"), Reading()) as source:
                whole = {name: part(stored, 0, 1) for name, stored in tensors_of(source).items()}
            assert all(torch.equal(whole[name], t) for name, t in full.items())
    finally:
        os.fsync, reading.CHUNK = fsync, before  # type: ignore[attr-defined]


FULL = """
import os, resource, sys
import torch, tpcore
from tpcore import checkpoint
from tpcore.checkpoint.offline.consolidate import consolidate
from tpcore.checkpoint.offline.reshard import reshard
tpcore.init(backend="cpu_gloo")
os.fsync = lambda fd: None
state = lambda v: {"model": {"w": torch.full((1000,), float(v))}, "n": v}
checkpoint.save(state(1), "c")
for limit in (0, 8, 100, 300, 1000, 4000, 4095):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for run in (lambda: checkpoint.save(state(2), "c"), lambda: consolidate("c", "whole"),
                lambda: reshard("c", "two", 2)):
        try:
            run()
        except tpcore.CheckpointError as e:
            assert "File too large" in str(e), e
        else:
            raise AssertionError(limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert os.listdir(".") == ["c"], os.listdir(".")
    assert checkpoint.load("c")["n"] == 1
"""


@pytest.mark.slow
def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as a full disk: writes fail in the middle of a file, and the error is as clear."""
    subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, check=True, timeout=100)
