"""Ranks as threads: deterministic, apart from one another, and clear about what went wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpcore
from tpcore.comm.comm import Comm
from tpcore.errors import BackendError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks, threads
from tpcore.testing.threads import RankThreads

TWO = Mesh({"tp": 2})


def test_results_come_in_rank_order() -> None:
    mesh = Mesh({"dp": 2, "tp": 3})
    assert run_ranks(mesh, lambda ctx: (ctx.rank, ctx.coord("dp"), ctx.coord("tp"))) == [
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2),
    ]  # fmt: skip


# -- random numbers ----------------------------------------------------------------------------------------


def test_ranks_start_from_the_callers_random_state_and_leave_it() -> None:
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    drawn = run_ranks(Mesh({"tp": 3}), lambda ctx: torch.rand(2))
    assert all(torch.equal(one, want) for one in drawn)
    assert torch.equal(torch.rand(2), want)


def test_a_rank_does_not_hear_anothers_draws_or_seed() -> None:
    def rank(ctx: ParallelContext) -> torch.Tensor:
        torch.manual_seed(ctx.rank)
        torch.rand(ctx.rank * 5)
        ctx.world.all_reduce(torch.ones(1))  # gives the baton away in the middle of the stream
        return torch.rand(3)

    def alone(rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        torch.rand(rank * 5)
        return torch.rand(3)

    state = torch.get_rng_state()
    got = run_ranks(Mesh({"tp": 4}), rank)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, alone(r)) for r, one in enumerate(got))


# -- what goes wrong ---------------------------------------------------------------------------------------


def test_deadlock_is_seen_at_once_and_lists_every_rank() -> None:
    def rank(ctx: ParallelContext) -> None:
        # rank 0 waits for 1, 1 for 3, 3 for 2 and 2 for 0
        ctx.comm("tp" if ctx.rank in (0, 3) else "dp").all_reduce(torch.ones(2, 3))

    with pytest.raises(BackendError) as error:
        run_ranks(Mesh({"dp": 2, "tp": 2}), rank)
    lines = str(error.value).splitlines()
    assert lines[0] == "deadlock: every rank waits for another"
    assert [line.split(" waits at ")[0].strip() for line in lines[1:]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert all("all_reduce sum of float32 [2, 3]" in line and "test_threads.py" in line for line in lines[1:])


def first(comm: Comm) -> object:
    return comm.all_reduce(torch.zeros(2, 3))


MISMATCHES: dict[str, Callable[[Comm], object]] = {
    "shape": lambda comm: comm.all_reduce(torch.zeros(3, 2)),
    "dtype": lambda comm: comm.all_reduce(torch.zeros(2, 3, dtype=torch.int32)),
    "op": lambda comm: comm.all_gather(torch.zeros(2, 3), 0),
}


@pytest.mark.parametrize("second", MISMATCHES.values(), ids=MISMATCHES)
def test_mismatch_is_an_error_on_both_ranks_and_names_both_call_sites(second: Callable[[Comm], object]) -> None:
    said: dict[int, str] = {}

    def rank(ctx: ParallelContext) -> None:
        call = (first, second)[ctx.rank]
        with pytest.raises(CollectiveMismatchError) as error:
            call(ctx.comm("tp"))
        said[ctx.rank] = str(error.value)

    run_ranks(TWO, rank)
    assert said[0] == said[1]
    assert "ranks 0 and 1 of group (0, 1) disagree" in said[0]
    assert "rank 0: #0 all_reduce sum of float32 [2, 3] at " in said[0]
    for code in (first.__code__, second.__code__):  # type: ignore[attr-defined]
        assert f"{code.co_filename}:{code.co_firstlineno + (code is first.__code__)}" in said[0]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_failure_is_what_is_raised(failing: int) -> None:
    seen: dict[int, str] = {}

    def rank(ctx: ParallelContext) -> None:
        if ctx.rank == failing:
            raise KeyError("the cause")
        try:
            ctx.comm("tp").all_reduce(torch.ones(1))
        except PeerLostError as e:
            seen[ctx.rank] = str(e)
            raise RuntimeError("a consequence, in the user's own words") from e

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(Mesh({"tp": 3}), rank)
    assert sorted(seen) == [r for r in range(3) if r != failing]
    assert all(f"rank {failing} failed with KeyError: 'the cause'" in text for text in seen.values())
    assert all("all_reduce sum of float32 [1]" in text for text in seen.values())


def test_a_rank_that_returns_early_is_named() -> None:
    def rank(ctx: ParallelContext) -> None:
        if ctx.rank == 0:
            ctx.comm("tp").all_reduce(torch.ones(1))

    with pytest.raises(PeerLostError, match=r"rank 1 has finished, but rank 0 waits for it at #0 all_reduce"):
        run_ranks(TWO, rank)


def test_failure_in_backward_reaches_the_ranks_that_wait_in_theirs() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("in backward")

    def rank(ctx: ParallelContext) -> None:
        x = torch.ones(2, requires_grad=True)
        y = tpcore.comm.mappings.copy(x, ctx.comm("tp"))
        (Fails.apply(y) if ctx.rank else y).sum().backward()

    with pytest.raises(ZeroDivisionError, match="in backward"):
        run_ranks(TWO, rank)


# -- turns -------------------------------------------------------------------------------------------------
BOTH = (0, 1)


def test_another_thread_may_wait_in_place_of_its_ranks() -> None:
    """As autograd's does on devices that have one each."""
    world = RankThreads(2)

    def by_another(rank: int) -> list[Any]:
        met: list[Any] = []
        beside = threading.Thread(target=lambda: met.extend(world.meet(BOTH, rank, "here", 10 * rank)))
        beside.start()
        beside.join()
        return met

    assert [outcome.value for outcome in world.run(by_another)] == [[("here", 0), ("here", 10)]] * 2


def test_a_rank_that_never_comes_is_reported_with_what_all_wait_for() -> None:
    world, over = RankThreads(2), threading.Event()
    first, second = world.run(lambda rank: world.meet(BOTH, rank, "here", 0) if rank == 0 else over.wait(), 0.5)
    over.set()
    assert isinstance(first.error, CollectiveTimeoutError)
    assert str(first.error) == str(second.error)
    assert re.search(r"^no rank has moved on for 0.5 s:\n  rank 0 waits .*\n  rank 1 runs at ", str(first.error))


def test_a_rank_that_runs_on_when_another_has_failed_is_soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GRACE", 0.2)
    world, over = RankThreads(2), threading.Event()
    first, second = world.run(lambda rank: 1 / 0 if rank == 0 else over.wait(20.0), 60.0)
    over.set()
    assert isinstance(first.error, ZeroDivisionError)
    assert isinstance(second.error, CollectiveTimeoutError)
    assert str(second.error).startswith("no rank has moved on for 0.2 s:\n  rank 0 failed with ZeroDivisionError")


def test_a_rank_that_comes_too_late_raises_and_the_others_with_it() -> None:
    """The time counts from the last move, here at the start: it is over, and not yet the grace."""
    world, cleaned = RankThreads(2), list[int]()

    def rank(rank: int) -> None:
        try:
            world.meet(BOTH, rank, "here", 0)
            if rank == 1:
                while not world._late:
                    threading.Event().wait(0.01)
            world.meet(BOTH, rank, "there", 0)
        finally:
            cleaned.append(rank)

    outcomes = world.run(rank, 1.0)
    assert [type(outcome.error) for outcome in outcomes] == [CollectiveTimeoutError] * 2
    assert sorted(cleaned) == [0, 1]
