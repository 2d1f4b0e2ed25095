"""A rank that dies, exits or raises: every other rank gets an error that names it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.endings import STOPPED, end, names, waits_in_a_chain
from helpers.rank_pool import RankPool
from helpers.tiers import diagonal
from helpers.transports import GLOO, SHARED, OverRoad, each_road  # noqa: F401  a fixture
from torch import Tensor, nn

from tpcore.errors import CollectiveTimeoutError, PeerLostError
from tpcore.layers import ColumnParallelLinear, RowParallelLinear
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext

ALONE, TP2, TP4, SQUARE = Mesh({"tp": 1}), Mesh({"tp": 2}), Mesh({"tp": 4}), Mesh({"dp": 2, "tp": 2})
HOW = ["killed", "fails", "leaves", "raises"]
WHERE = ["forward", "backward"]
ON_A_ROAD = [*zip(HOW, 2 * [SHARED, GLOO], strict=True)]


def quick(test: str, params: Mapping[str, Any]) -> bool:
    """Each end, place and road."""
    if params.keys() == {"pool"}:  # a time-out
        return bool(params["pool"] is (SHARED if "to_make" in test or "connect" in test else GLOO))
    return not params or diagonal(params, how=HOW, where=WHERE, check=["1", "0"], pool=[SHARED, GLOO])


class _Fault(nn.Module):
    """The identity, that ends its rank in forward or in backward."""

    def __init__(self, how: str, where: str) -> None:
        super().__init__()
        self.how, self.where = how, where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            end(self.how)
        if self.where == "backward":
            x.register_hook(lambda grad: end(self.how))
        return x


def _train(ctx: ParallelContext, how: str, where: str) -> None:
    torch.manual_seed(0)
    fault = _Fault(how, where if ctx.rank == 1 else "nowhere")
    model = nn.Sequential(
        ColumnParallelLinear(8, 16, gather_output=False), fault, RowParallelLinear(16, 8, input_is_parallel=True)
    )
    model(torch.ones(2, 8)).sum().backward()
    ctx.world.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("how", "where"), [*zip(HOW, 2 * WHERE, strict=True)])
def test_the_lost_rank_is_named(pool: OverRoad, how: str, where: str) -> None:
    error = pool.outcomes(TP2, _train, how, where)[0].error
    assert isinstance(error, PeerLostError), "rank 0 went on without rank 1"
    assert names(str(error), 1, how), str(error)


def _chain(ctx: ParallelContext, how: str, release: str) -> str:
    for axis in ("dp", "tp"):  # their groups are made before one ends
        ctx.comm(axis)
    ctx.world.all_reduce(torch.ones(1))
    if ctx.rank == 3:
        end(how)
    return waits_in_a_chain(ctx, release)


@pytest.mark.parametrize(("how", "pool"), ON_A_ROAD, indirect=["pool"])
def test_a_rank_that_waits_for_a_waiting_rank_gets_the_right_name(pool: OverRoad, tmp_path: Path, how: str) -> None:
    outcomes = pool.outcomes(SQUARE, _chain, how, str(tmp_path / "release"))
    for rank in (0, 1, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        assert names(outcomes[rank].value, 3, how), outcomes[rank].value


def _lose_rank_1(ctx: ParallelContext) -> str:
    try:
        for _ in range(3):
            ctx.comm("tp").all_reduce(torch.ones(4))
            if ctx.rank == 1:
                end("raises")
    except PeerLostError as e:
        return str(e)
    return "no error"


def _groups_left(ctx: ParallelContext, expected: int) -> int:
    """Process groups of gloo in this process beside this job's own; one thread of each has this name."""
    deadline, found = time.monotonic() + 10.0, -1
    while found != expected and time.monotonic() < deadline:  # a thread takes its name when it first runs
        tasks = Path("/proc/self/task").iterdir()
        found = [task.joinpath("comm").read_text() for task in tasks].count("gloo_tcp_loop\n") - 1
    return found


def test_leaving_a_lost_job_does_not_wait_for_calls_of_gloo() -> None:
    """A thread of gloo may wait for the time-out in such a call, so the group that would join it stays."""
    with RankPool(2) as pool:
        assert pool.run(TP2, _groups_left, 0)[0] == 0
        assert pool.run(ALONE, _groups_left, 0)[0] == 0
        assert names(pool.outcomes(TP2, _lose_rank_1, env={"TPCORE_SHM": "0"})[0].value, 1, "raises")
        assert pool.run(ALONE, _groups_left, 1)[0] == 1


def _sum(ctx: ParallelContext, how: str | None = None) -> float:
    if how is not None and ctx.rank == 2:
        end(how)
    return float(ctx.world.all_reduce(torch.ones(())))


@pytest.mark.parametrize("pool", [GLOO], indirect=True)
def test_all_of_four_learn_the_name(pool: OverRoad) -> None:
    outcomes = pool.outcomes(TP4, _sum, "killed")
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank].error, PeerLostError)
        assert names(str(outcomes[rank].error), 2, "killed")
    assert pool.run(TP4, _sum) == [4.0] * 4, "the pool is whole again"


def _leave(ctx: ParallelContext) -> float:
    if ctx.rank == 1:
        return 0.0
    return float(ctx.comm("tp").all_reduce(torch.ones(())))


def test_a_rank_that_finishes_early(pool: OverRoad) -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 .* left the job"):
        pool.run(TP2, _leave)


def _last_words(ctx: ParallelContext) -> float:
    total = float(ctx.world.all_reduce(torch.ones(())))
    raise ValueError(f"all of us saw {total}")


def test_an_error_that_all_raise_is_not_taken_for_a_loss(pool: OverRoad) -> None:
    for outcome in pool.outcomes(TP4, _last_words):
        assert type(outcome.error) is ValueError, "cut off in the middle of its last collective"


def _stopped(ctx: ParallelContext, folder: str) -> None:
    dp, tp = ctx.comm("dp"), ctx.comm("tp")
    started = time.monotonic()
    while float(ctx.world.broadcast(torch.tensor(time.monotonic() - started), 0)) < 1.5:
        tp.all_reduce(torch.ones(4))  # long enough for every journal to have been published
    pids = ctx.world.all_gather(torch.tensor([os.getpid()]), 0).tolist()
    if ctx.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        (tp if ctx.rank > 1 else dp).all_reduce(torch.ones(5))
        dp.all_reduce(torch.ones(6))
    finally:
        Path(folder, str(ctx.rank)).touch()
        if ctx.rank == 0:  # not before all have their error: the next call of rank 3 is one that they made
            while len(os.listdir(folder)) < 3:
                time.sleep(0.01)
            os.kill(pids[3], signal.SIGCONT)


def test_a_stopped_rank_is_reported_at_the_timeout(pool: OverRoad, tmp_path: Path) -> None:
    outcomes = pool.outcomes(SQUARE, _stopped, str(tmp_path), timeout=5.0)
    for rank in (0, 1, 2, 3):
        error = outcomes[rank].error
        assert isinstance(error, CollectiveTimeoutError)
        report = str(error)
        assert re.search(r"rank [012] waited 5 s in a collective", report)
        assert re.search(r"waits for rank 3, which did not come \(pid \d+ on .* is stopped, by SIGSTOP", report)
        for r in range(4):
            assert re.search(rf"\n  rank {r}\b.*:\n(    .*\n)*    tp .* all_reduce sum of float32 \[4\] at ", report)
        assert re.search(r"\n    tp \[2, 3\] #\d+ all_reduce sum of float32 \[5\] at ", report)


def _absent(ctx: ParallelContext, release: str, made: bool = True, several: bool = False) -> None:
    """Rank 1 comes to no call of rank 0, to ``several`` that are under way or to the group that is to be ``made``."""
    if made:
        ctx.comm("tp")
    if ctx.rank == 1:
        while not Path(release).exists():
            time.sleep(0.01)
        return
    try:
        comm = ctx.comm("tp")
        waits = [comm.start_all_reduce(torch.ones(7)) for _ in range(3 if several else 0)]
        if several:
            time.sleep(6.0)  # longer than the time-out: all have failed, of which one says why
        for wait in reversed(waits):
            wait()
        if not several:
            comm.all_reduce(torch.ones(7))
    finally:
        Path(release).touch()


@pytest.mark.parametrize(("check", "pool"), [("1", SHARED), ("0", GLOO)], indirect=["pool"])
def test_a_rank_that_does_not_come_is_reported_at_the_timeout(pool: OverRoad, tmp_path: Path, check: str) -> None:
    env = {"TPCORE_CHECK": check}
    error = pool.outcomes(TP2, _absent, str(tmp_path / "release"), timeout=5.0, env=env)[0].error
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 0 waited 5 s in a collective of group [0, 1]" in str(error)
    assert "rank 0 waits for rank 1, which did not come" in str(error)
    assert "#1 all_reduce sum of float32 [7]" in str(error)


def test_the_last_of_several_that_are_under_way_tells_the_timeout(pool: OverRoad, tmp_path: Path) -> None:
    arguments, env = (str(tmp_path / "release"), True, True), {"TPCORE_CHECK": "0"}
    error = pool.outcomes(TP2, _absent, *arguments, timeout=5.0, env=env)[0].error
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 0 waits for rank 1, which did not come" in str(error)


def test_a_rank_that_does_not_come_to_make_a_group(pool: OverRoad, tmp_path: Path) -> None:
    error = pool.outcomes(TP2, _absent, str(tmp_path / "release"), False, timeout=5.0)[0].error
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 0 waited 5 s to make group 0: rank 1 of 2 did not come" in str(error)


def _stopped_before_it_connects(ctx: ParallelContext) -> None:
    pids = ctx.world.all_gather(torch.tensor([os.getpid()]), 0).tolist()
    make = dist.new_group
    with pytest.MonkeyPatch.context() as patch:

        def stop_once(*args: object, **options: object) -> object:
            patch.setattr(dist, "new_group", make)
            end(STOPPED)
            return make(*args, **options)

        if ctx.rank == 3:
            patch.setattr(dist, "new_group", stop_once)
        try:
            ctx.comm("tp")
        finally:
            if ctx.rank == 2:  # continued, it would wait in gloo for rank 2, which has given up and whose process lives
                os.kill(pids[3], signal.SIGKILL)


def test_a_rank_that_does_not_connect_is_named_at_the_timeout(pool: OverRoad) -> None:
    error = pool.outcomes(SQUARE, _stopped_before_it_connects, timeout=5.0)[2].error
    assert isinstance(error, CollectiveTimeoutError)
    assert re.match(
        r"rank 2 waited 5 s to connect with rank 3 \(pid \d+ on .* is stopped, .*: Wait timeout", str(error)
    )
