"""Rewriting needs memory for a part at a time, whatever the total."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tpcore.checkpoint.offline.consolidate import consolidate
from tpcore.checkpoint.offline.reshard import reshard
from tpcore.checkpoint.read.source import CutRule

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
