"""Many calls of a traced model: no call costs more than the ones before it, and nothing piles up."""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tpcore
from tpcore.trace import parallel_model_load, parallel_model_save, parallel_model_trace

ROWS, WIDTH = 64, 256  # 64 KB in, 64 KB out

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.usefixtures("default_checks"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads memory and processor time from /proc"),
]


def descendants() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(pid: int) -> float:
    """Of all threads that live; unlike the clock, it does not count what other programs do."""
    return sum(int(f.read_text().split()[0]) for f in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9


def handles(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        tpcore.ColumnParallelLinear(WIDTH, WIDTH, gather_output=False),
        tpcore.RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True),
    )


def spent(model: Any, x: torch.Tensor, calls: int, pids: Iterable[int]) -> float:
    """Processor seconds of the processes ``pids`` in ``calls`` calls."""
    start = sum(map(processor_seconds, pids))
    for _ in range(calls):
        model(x)
    return sum(map(processor_seconds, pids)) - start


@pytest.mark.parametrize("calls", [1000, pytest.param(10_000, marks=pytest.mark.drill)])
def test_calls_do_not_get_dearer_and_memory_does_not_grow(calls: int, tmp_path: Path) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    before = set(descendants())
    with parallel_model_trace(build, x, tp_degree=2) as model:
        first = model(x)
        mine, workers = os.getpid(), sorted(set(descendants()) - before)
        assert len(workers) >= 2
        for _ in range(calls // 10):  # allocators and caches fill up, and all buffers come into use
            model(x)
        gc.collect()
        memory = {pid: resident(pid) for pid in (mine, *workers)}
        files = {pid: handles(pid) for pid in (mine, *workers)}
        for _ in range(calls):
            out = model(x)
        gc.collect()
        assert torch.equal(out, first)
        assert {pid: handles(pid) for pid in files} == files
        # One input or output kept per call would be 64 KB * calls, 64 MB in the short test.
        grown = {pid: resident(pid) - size for pid, size in memory.items()}
        assert max(grown.values()) < 4e6, grown
        # A busy machine doubles what a call costs, for ranks spin until the others have their turn: so a new model is
        # asked in turns with the one that has answered often.
        parallel_model_save(model, tmp_path / "traced")
        with parallel_model_load(tmp_path / "traced") as new:
            for _ in range(calls // 10):
                new(x)
            others = sorted(set(descendants()) - before - set(workers))
            assert len(others) >= 2
            turns = [(spent(model, x, 20, (mine, *workers)), spent(new, x, 20, (mine, *others))) for _ in range(10)]
        worn, fresh = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
        assert worn < 2 * fresh, turns
    assert not set(workers) & set(descendants())
