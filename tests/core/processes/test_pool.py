"""The pool that the other process tests stand on, and what passes between processes."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest
import torch
from helpers.rank_pool import RankPool, RankStuck

from tpcore.layout.mesh import Mesh
from tpcore.processes.transfer import SharedBuffer
from tpcore.runtime.context import ParallelContext, current


def _where(ctx: ParallelContext) -> tuple[int, int, bool, int, str | None]:
    return ctx.rank, os.getpid(), current() is ctx, torch.get_num_threads(), os.environ.get("COLOUR")


def test_ranks_are_processes_in_order_and_a_small_world_uses_the_first(pool: RankPool) -> None:
    seen = pool.run(Mesh({"tp": 2}), _where, env={"COLOUR": "red"})
    assert seen == [(rank, pool.pids()[rank], True, 1, "red") for rank in (0, 1)]
    assert len(set(pool.pids())) == 4
    assert pool.run(Mesh({"tp": 1}), _where) == [(0, pool.pids()[0], True, 1, None)]


def _loop_without_end(ctx: ParallelContext) -> NoReturn:
    while True:
        torch.ones(1) + 1


def test_a_stuck_rank_shows_its_stacks_and_is_replaced() -> None:
    with RankPool(1, grace=0.5) as small:
        before = small.pids()
        for run in (small.run, small.outcomes):
            assert small.run(Mesh({"tp": 1}), _where)[0][0] == 0  # it has started
            with pytest.raises(RankStuck, match=r"rank 0 gave no answer[\s\S]*in _loop_without_end"):
                run(Mesh({"tp": 1}), _loop_without_end, timeout=0.5)
        assert small.pids() != before
        assert small.run(Mesh({"tp": 1}), _where)[0][0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_the_other_side_reads_what_was_put(dtype: torch.dtype) -> None:
    writer = SharedBuffer()
    reader = SharedBuffer(os.dup(writer.fd))
    for size in (3, 5000, 7):  # it grows, and stays grown
        sent = [torch.arange(size).to(dtype), torch.ones(size, 2).to(dtype).t(), torch.empty(0, 4).to(dtype)]
        got = reader.get(writer.put(sent))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, sent, strict=True))
    for side in (writer, reader):
        side.close()


def test_nothing_of_it_has_a_name() -> None:
    buffer = SharedBuffer()
    buffer.put([torch.zeros(10)])
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{buffer.fd}")
    buffer.close()


def test_memory_keeps_nothing_of_the_graph_behind_a_tensor() -> None:
    buffer, x = SharedBuffer(), torch.ones(3, requires_grad=True)
    for inside in (True, False):
        with torch.inference_mode(inside):  # the first to see the memory leaves no mark on it
            views = buffer.get(buffer.put([2 * x]))
    assert views[0].tolist() == [2.0] * 3
    assert views[0].grad_fn is None
    assert not views[0].requires_grad
    buffer.close()
