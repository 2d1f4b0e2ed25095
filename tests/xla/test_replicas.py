"""The harness itself: what it isolates, what it compares, and how it fails."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest
import torch
from onreplicas import on_replicas

import tpcore
from tpcore.runtime.context import ParallelContext
from tpcore_neuron.testing import Program, lower, programs, run_replicas


def who_am_i() -> tuple[object, ...]:
    import torch.distributed as dist
    import torch_xla
    import torch_xla.runtime as xr

    dist.init_process_group("xla", init_method="xla://")
    return (
        xr.global_ordinal(), xr.world_size(), dist.get_rank(), dist.get_world_size(),
        os.environ["RANK"], os.environ["WORLD_SIZE"], str(torch_xla.device()),
    )  # fmt: skip


def test_a_rank_sees_what_torchrun_would_show_it():
    want = [(r, 4, r, 4, str(r), "4", f"xla:{r}") for r in range(4)]
    assert run_replicas(who_am_i, 4) == want


def private_state() -> list[object]:
    import torch_xla.core.xla_model as xm

    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    os.environ["MINE"] = str(rank)
    xm.rendezvous("meet")  # the others run in between
    numbers = [torch.rand(1).item(), random.random(), np.random.rand()]
    return [*numbers, os.environ["MINE"]]


def test_random_state_and_environment_are_each_ranks_own():
    got = run_replicas(private_state, 4)
    for rank, values in enumerate(got):
        random_numbers = [
            torch.rand(1, generator=torch.Generator().manual_seed(rank)).item(),
            random.Random(rank).random(),
            np.random.RandomState(rank).rand(),
        ]
        assert values == [*random_numbers, str(rank)]
    assert "MINE" not in os.environ
    assert run_replicas(lambda: os.environ.get("MINE"), 4) == [None] * 4


def reads_alone(ctx: ParallelContext) -> float:
    loss = tpcore.comm.mappings.reduce(torch.tensor([1.0]).to(ctx.device), ctx.comm("tp"))
    ctx.backend.mark_step()
    return (loss * 3).item() + 1 if ctx.rank == 0 else loss.item()


def test_a_rank_may_read_and_branch_where_no_collective_is_pending():
    assert on_replicas(4, 2, reads_alone) == [7.0, 2.0, 2.0, 2.0]


def rank_in_the_program(ctx: ParallelContext) -> None:
    x = torch.ones(3).to(ctx.device)
    held = ctx.comm("tp").all_reduce(x + 2 if ctx.rank == 3 else x * 2)
    ctx.backend.mark_step()
    del held  # only now: what nobody holds is no part of a program


def test_programs_that_differ_are_shown_with_ranks_and_lines():
    with pytest.raises(tpcore.CollectiveMismatchError) as failed:
        on_replicas(4, 2, rank_in_the_program)
    text = str(failed.value)
    assert "ranks [3] would run another program than rank 0 at sync" in text
    assert "test_replicas.py" in text
    assert any(line.startswith("-") and "stablehlo.multiply" in line for line in text.splitlines())
    assert any(line.startswith("+") and "stablehlo.add" in line for line in text.splitlines())


def fails_on_one(ctx: ParallelContext) -> None:
    if ctx.rank == 1:
        raise KeyError("only rank 1")
    ctx.backend.mark_step()


def test_the_error_of_one_rank_is_what_the_caller_sees_and_the_next_run_is_clean():
    with pytest.raises(KeyError, match="only rank 1"):
        on_replicas(4, 2, fails_on_one)
    assert on_replicas(4, 2, lambda ctx: ctx.rank) == [0, 1, 2, 3]


def leaves_early(ctx: ParallelContext) -> None:
    if ctx.rank != 1:
        ctx.backend.mark_step()


def test_a_rank_that_leaves_is_named():
    with pytest.raises(tpcore.PeerLostError, match=r"rank 1 has finished, but rank \d waits for it at sync"):
        on_replicas(4, 2, leaves_early)


def comes_elsewhere(ctx: ParallelContext) -> None:
    import torch_xla.core.xla_model as xm

    if ctx.rank == 2:
        xm.rendezvous("elsewhere")
    ctx.backend.mark_step()


def test_ranks_at_different_points_are_told_apart():
    message = r"(?s)rank 1 waits at sync.*rank 2 waits at rendezvous 'elsewhere'"
    with pytest.raises(tpcore.CollectiveMismatchError, match=message):
        on_replicas(4, 2, comes_elsewhere)


def never_comes(ctx: ParallelContext) -> None:
    if ctx.rank == 0:
        threading.Event().wait()
    ctx.backend.mark_step()


def test_a_rank_that_never_comes_is_reported_with_what_all_wait_for():
    message = r"(?s)no rank has moved on for 3 s:\n  rank 0 runs at .*never_comes.*\n  rank 1 waits"
    with pytest.raises(tpcore.CollectiveTimeoutError, match=message):
        on_replicas(2, 2, never_comes, timeout=3.0)
    assert on_replicas(2, 2, lambda ctx: ctx.rank) == [0, 1]  # in a new process


def lowers(ctx: ParallelContext) -> tuple[Program, int]:
    x = torch.ones(4, 6).to(ctx.device)
    return lower(ctx.comm("tp").all_gather(x, 1)), len(programs())


def test_lower_shows_a_program_and_compiles_nothing():
    program, ran = on_replicas(4, 2, lowers)[0]
    (collective,) = program.collectives
    assert (collective.kind, collective.groups) == ("all_gather", ((0, 1), (2, 3)))
    assert (collective.operands, collective.nbytes) == ((("f32", (4, 6)),), 96)
    assert ran == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="world must be a whole number of replicas, 1 or more, not 0"):
        run_replicas(who_am_i, 0)
