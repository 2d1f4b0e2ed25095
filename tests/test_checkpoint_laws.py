"""Written at one degree, rewritten at others and back: the same bits, in bounded memory. A disk that takes no more."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import values
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_shard import DEGREES, fits, specs
from torch import Tensor

from tpcore.checkpoint import stored as reading
from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.manifest import FORMAT
from tpcore.checkpoint.read.source import CutRule, cuts_by, opened, part
from tpcore.checkpoint.rewrite import consolidate, reshard
from tpcore.checkpoint.storage import files
from tpcore.checkpoint.storage.files import combined_crc32
from tpcore.checkpoint.storage.publish import Staging
from tpcore.checkpoint.write.save import put_in_place, write_state, write_tensor_files
from tpcore.checkpoint.write.snapshot import Part
from tpcore.layout.layout import Layout
from tpcore.layout.shard import ShardSpec


def write(path: Path, full: dict[str, Tensor], cuts: dict[str, ShardSpec], n: int) -> None:
    """What ``save`` writes on ``n`` ranks, without ranks. The first tensor is tied to another name."""
    staging = Staging(str(path), "0" * 32, FORMAT)
    records = {}
    for rank in range(n):
        model = {name: cuts[name].shard(t, rank, n) for name, t in full.items()}
        by_id = {id(t): Layout.of(cuts[name], "tp") for name, t in model.items()}
        model["tied"] = model["0"]
        done = Part({"model": model, "epoch": 3}, lambda t, where, c=by_id: c.get(id(t)))  # type: ignore[misc]
        name = f"tp_rank_{rank}"
        written, tensors = write_tensor_files(staging.path, name, "0" * 32, done.files, files.SILENT)
        records |= written | write_state(staging.path, name, "0" * 32, tensors, done.tree)
    put_in_place(staging, "0" * 32, {"tp": n}, records)
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
    assume(all(fits(spec, n) for spec in drawn for n in (a, b, c)))
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
            whole = values(Path(home, "whole"))
            assert all(torch.equal(whole[name], t) for name, t in full.items())
    finally:
        os.fsync, reading.CHUNK = fsync, before  # type: ignore[attr-defined]


FULL = """
import os, resource, sys
import torch, tpcore
from tpcore import checkpoint
from tpcore.checkpoint.rewrite import consolidate
from tpcore.checkpoint.rewrite import reshard
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


# -- memory and checksums -----------------------------------------------------------------------------------
MB = 1 << 20
LARGEST, COUNT = 16 * MB, 24  # 384 MB in all


def grown(run: Callable[[], object]) -> int:
    """By how much the peak of resident memory is above what was resident before."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = status("VmRSS:")
    run()
    return status("VmHWM:") - before


@pytest.mark.slow
def test_peaks_do_not_grow_with_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    rows = LARGEST // 4096 // 4
    t = torch.arange(rows * 4096, dtype=torch.float32).view(rows, 4096)
    save_file({str(i): t + i for i in range(COUNT)}, tmp_path / "whole.safetensors")
    rules = [CutRule(str(i), i % 2) for i in range(COUNT)]  # half of them along rows, half along columns
    steps: dict[str, Callable[[], Any]] = {
        "cut": lambda: reshard(tmp_path / "whole.safetensors", tmp_path / "2", 2, rules=rules),
        "reshard": lambda: reshard(tmp_path / "2", tmp_path / "4", 4),
        "consolidate": lambda: consolidate(tmp_path / "4", tmp_path / "out"),
    }
    peaks = {name: grown(run) for name, run in steps.items()}
    # far below the 256 MB beyond twice the largest tensor that are allowed, and below a quarter of the total
    assert all(peak < 2 * LARGEST + 64 * MB for peak in peaks.values()), peaks


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(0, 5000))
def test_joined(parts: list[bytes], zeros: int) -> None:
    parts.append(bytes(zeros))
    assert combined_crc32((zlib.crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("sizes", [(), (0,), (5, 0, 7), (10, 23, 1, 40)])
def test_write_parts(sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of all sizes, some of which have the disk begin early."""
    monkeypatch.setattr(files, "CHUNK", 7)
    monkeypatch.setattr(files, "_EARLY", 14)
    parts = [bytes(range(size)) for size in sizes]
    record, crcs = files.write_parts(str(tmp_path / "f"), ([part[:5], part[5:]] for part in parts))
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert record == (sum(sizes), f"{zlib.crc32(b''.join(parts)):08x}")
    assert crcs == [f"{zlib.crc32(part):08x}" for part in parts]
