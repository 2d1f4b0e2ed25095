"""Memory that stays: a large tensor that is freed and allocated again costs no page faults."""

from __future__ import annotations

import resource

import torch

import tpcore
from tpcore.context import ParallelContext
from tpcore.mesh import Mesh
from tpcore.processes.pool import RankPool


def _faults(times: int) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(16 << 20)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _before_and_after(ctx: ParallelContext) -> tuple[int, bool, int]:
    before = _faults(3)
    kept = tpcore.keep_freed_memory()
    _faults(1)
    return before, kept, _faults(3)


def test_freed_memory_is_used_again() -> None:
    with RankPool(1) as pool:  # a process of its own, for what it keeps
        before, kept, after = pool.run(Mesh({"tp": 1}), _before_and_after)[0]
    if kept:
        assert after < 100 < before
