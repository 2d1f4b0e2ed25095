"""The pool that the other process tests stand on."""

from __future__ import annotations

import os
import re
import threading
from typing import NoReturn

import pytest
import torch
from rank_pool import RankPool, RankStuck

from tpcore.errors import PeerLostError
from tpcore.layout.mesh import Mesh
from tpcore.processes.transfer import RankTraceback
from tpcore.runtime.context import ParallelContext, current


def _where(ctx: ParallelContext) -> tuple[int, int, bool, int, str | None]:
    return ctx.rank, os.getpid(), current() is ctx, torch.get_num_threads(), os.environ.get("COLOUR")


def test_ranks_are_processes_in_order_and_a_small_world_uses_the_first(pool: RankPool) -> None:
    seen = pool.run(Mesh({"tp": 2}), _where, env={"COLOUR": "red"})
    assert seen == [(rank, pool.pids()[rank], True, 1, "red") for rank in (0, 1)]
    assert len(set(pool.pids())) == 4
    assert pool.run(Mesh({"tp": 1}), _where) == [(0, pool.pids()[0], True, 1, None)]


def test_errors_keep_their_type_and_bring_their_traceback(pool: RankPool) -> None:
    class Peculiar(Exception):
        def __init__(self, rank: int, detail: str) -> None:
            super().__init__(rank, detail)

    def fail(ctx: ParallelContext) -> None:
        if ctx.rank == 1:
            raise Peculiar(1, "odd")
        ctx.comm("tp").all_reduce(torch.ones(1))

    outcomes = pool.outcomes(Mesh({"tp": 2}), fail)
    assert isinstance(outcomes[0].error, PeerLostError)
    with pytest.raises(Peculiar, match="odd") as e:
        pool.run(Mesh({"tp": 2}), fail)
    assert isinstance(e.value.__cause__, RankTraceback)
    assert re.search(r"rank 1:\nTraceback[\s\S]*in fail", str(e.value.__cause__))


def _not_picklable(ctx: ParallelContext) -> object:
    if ctx.rank == 0:
        return threading.Lock()
    error = ValueError("held")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def test_what_cannot_travel_is_told(pool: RankPool) -> None:
    result, error = (o.error for o in pool.outcomes(Mesh({"tp": 2}), _not_picklable))
    assert isinstance(result, ValueError)
    assert "the result of rank 0 cannot be sent" in str(result)
    assert isinstance(error, RuntimeError)
    assert "ValueError: held" in str(error)


def _loop_without_end(ctx: ParallelContext) -> NoReturn:
    while True:
        torch.ones(1) + 1


def test_a_stuck_rank_shows_its_stacks_and_is_replaced() -> None:
    with RankPool(1, grace=0.5) as small:
        before = small.pids()
        for run in (small.run, small.outcomes):
            with pytest.raises(RankStuck, match=r"rank 0 gave no answer[\s\S]*in _loop_without_end"):
                run(Mesh({"tp": 1}), _loop_without_end, timeout=0.5)
        assert small.pids() != before
        assert small.run(Mesh({"tp": 1}), _where)[0][0] == 0
