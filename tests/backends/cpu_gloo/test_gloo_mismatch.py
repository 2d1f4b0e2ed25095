"""Ranks that make different collectives: an error on every one of them, before any data moves.

Unchecked, gloo answers most of these with wrong data and no error, some by aborting the process, one by
waiting until the timeout.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.endings import said
from helpers.transports import GLOO, SHARED, OverRoad, each_road  # noqa: F401  a fixture

import tpcore
from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm
from tpcore.errors import CollectiveMismatchError
from tpcore.layers import ColumnParallelLinear
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.settings import changed
from tpcore_cpu_gloo import GlooBackend

Program = Callable[[Comm, bool], object]


def swapped_operations(comm: Comm, odd: bool) -> object:
    calls = [lambda: comm.all_reduce(torch.ones(4)), lambda: comm.broadcast(torch.ones(4), 0)]
    return [call() for call in (reversed(calls) if odd else calls)]


def swapped_calls_of_one_shape(comm: Comm, odd: bool) -> object:
    def loss() -> object:
        return comm.all_reduce(torch.ones(4))

    def accuracy() -> object:
        return comm.all_reduce(torch.zeros(4))

    return [call() for call in ((accuracy, loss) if odd else (loss, accuracy))]


def started_and_not_waited_for(comm: Comm, odd: bool) -> object:
    first = comm.start_all_reduce(torch.ones(4))
    second = comm.start_all_reduce(torch.ones(5 if odd else 4))
    return first(), second()


def one_call_more(comm: Comm, odd: bool) -> object:
    if odd:
        comm.all_reduce(torch.ones(4))
    return comm.all_gather(torch.ones(4), 0)


def in_backward(comm: Comm, odd: bool) -> object:
    x = torch.ones(5 if odd else 4, requires_grad=True)
    return ops.copy(x, comm).sum().backward()  # no collective in forward; backward sums the gradient


def between_two_layers_in_backward(comm: Comm, odd: bool) -> object:
    torch.manual_seed(0)
    first = ColumnParallelLinear(8, 8, group=comm)
    second = ColumnParallelLinear(8, 8, group=comm)
    x = first(torch.ones(2, 8, requires_grad=True))
    x.register_hook(lambda grad: comm.all_reduce(grad, "max") if odd else None)
    return second(x).sum().backward()


KINDS: dict[str, Program] = {
    "larger_shape": lambda comm, odd: comm.all_reduce(torch.ones(8 if odd else 4)),
    "transposed": lambda comm, odd: comm.all_reduce(torch.ones((3, 2) if odd else (2, 3))),
    "larger_dtype": lambda comm, odd: comm.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
    "other_dtype_of_the_same_size": lambda comm, odd: comm.all_reduce(
        torch.ones(4, dtype=torch.int32 if odd else torch.float32)
    ),
    "bool_against_uint8": lambda comm, odd: comm.all_reduce(
        torch.ones(4, dtype=torch.bool if odd else torch.uint8), "max"
    ),
    "sum_against_max": lambda comm, odd: comm.all_reduce(torch.ones(4), "max" if odd else "sum"),
    "gathered_dims": lambda comm, odd: comm.all_gather(torch.ones(4, 4), 1 if odd else 0),
    "broadcast_sources": lambda comm, odd: comm.broadcast(torch.ones(4), 1 if odd else 0),
    "all_reduce_against_all_gather": lambda comm, odd: (
        comm.all_gather(torch.ones(4), 0) if odd else comm.all_reduce(torch.ones(4))
    ),
    **{
        f.__name__: f
        for f in (
            swapped_operations,
            swapped_calls_of_one_shape,
            started_and_not_waited_for,
            one_call_more,
            in_backward,
            between_two_layers_in_backward,
        )
    },
}


WARMUP = {"TPCORE_CHECK": "warmup"}
_CHECKED = 512


def _advance(comm: Comm, calls: int) -> None:
    """As if so many calls had been made, which takes seconds."""
    transport: Any = comm.transport
    waiting = transport._exchange.waiting if hasattr(transport, "_exchange") else transport._watch
    waiting.seq += calls


def _message(ctx: ParallelContext, kind: str, odd: int, before: int = 0) -> str:
    comm = ctx.comm("tp")
    comm.all_reduce(torch.ones(1))
    _advance(comm, before)
    return said(CollectiveMismatchError, lambda: KINDS[kind](comm, ctx.rank == odd))


def quick(test: str, params: Mapping[str, Any]) -> bool:
    """What is not told for each kind, on one road."""
    return "kind" in params or not params or params.get("pool") is GLOO


def each_on_a_road(kinds: Iterable[str]) -> pytest.MarkDecorator:
    points = [(kind, (SHARED, GLOO)[i % 2]) for i, kind in enumerate(kinds)]
    return pytest.mark.parametrize(("kind", "pool"), points, indirect=["pool"])


@each_on_a_road(KINDS)
def test_every_rank_learns_who_disagrees_and_where(pool: OverRoad, kind: str) -> None:
    messages = pool.run(Mesh({"tp": 2}), _message, kind, 1)
    assert messages[0] == messages[1]
    assert "ranks 0 and 1 of group (0, 1) disagree" in messages[0]
    for rank in (0, 1):
        assert re.search(rf"\n  rank {rank}: #\d+ \w+.* at .*test_gloo_mismatch\.py:\d+ in ", messages[0])


@each_on_a_road(["sum_against_max", "all_reduce_against_all_gather", "in_backward"])
def test_one_rank_of_four_disagrees(pool: OverRoad, kind: str) -> None:
    messages = pool.run(Mesh({"tp": 4}), _message, kind, 2)
    assert len(set(messages)) == 1
    assert "ranks 0 and 2 of group (0, 1, 2, 3) disagree" in messages[0]


def _other_group(ctx: ParallelContext) -> str:
    dp, tp = ctx.comm("dp"), ctx.comm("tp")
    tp.all_reduce(torch.ones(1))
    try:
        dp.all_reduce(torch.ones(5 if ctx.rank == 3 else 4))
        return f"sum {float(tp.broadcast(torch.ones(1), 0))}"
    except CollectiveMismatchError as e:
        return str(e)


def test_a_mismatch_is_named_by_world_ranks_and_leaves_other_groups_alone(pool: OverRoad) -> None:
    outcomes = pool.outcomes(Mesh({"dp": 2, "tp": 2}), _other_group, timeout=20.0)
    for rank in (1, 3):
        assert "ranks 1 and 3 of group (1, 3) disagree" in outcomes[rank].value
    for rank in (0, 2):  # they wait for a rank that caught its error and has left
        assert re.match(r"rank [13] \(pid \d+ on .*\) left the job", str(outcomes[rank].error))


def _from_two_lines(ctx: ParallelContext) -> float:
    comm = ctx.comm("tp")
    if ctx.rank == 0:
        return float(comm.broadcast(torch.tensor(3.0), 0))
    return float(comm.broadcast(torch.zeros(()), 0))


@pytest.mark.skipif("TPCORE_CHECK" not in os.environ, reason="an extension checks runs, and none is here")
def test_the_same_call_from_two_places_is_a_mismatch_only_where_all_is_checked(pool: OverRoad) -> None:
    with pytest.raises(CollectiveMismatchError, match="in _from_two_lines"):
        pool.run(Mesh({"tp": 2}), _from_two_lines)
    assert pool.run(Mesh({"tp": 2}), _from_two_lines, env={"TPCORE_CHECK": "warmup"}) == [3.0, 3.0]


def _agree_then_differ(ctx: ParallelContext, calls: int) -> None:
    comm = ctx.comm("tp")
    for _ in range(calls):
        comm.all_reduce(torch.ones(()))
    comm.all_reduce(torch.ones(1), "sum" if ctx.rank == 0 else "max")


LATE = ("transposed", "sum_against_max", "swapped_operations", "one_call_more", "in_backward")


@each_on_a_road(LATE)
def test_calls_after_the_checked_ones_are_compared_too(pool: OverRoad, kind: str) -> None:
    """Before the wrong numbers are returned, and before gloo would abort the process."""
    messages = pool.run(Mesh({"tp": 2}), _message, kind, 1, _CHECKED, env=WARMUP)
    assert messages[0] == messages[1]
    assert "ranks 0 and 1 of group (0, 1) disagree" in messages[0]


@pytest.mark.parametrize("before", [0, _CHECKED])
def test_swapped_calls_of_one_shape_are_found_at_the_second(pool: OverRoad, before: int) -> None:
    if pool.shared and before:
        pytest.skip("after the first calls, shared memory compares the place of one call in 17")
    messages = pool.run(
        Mesh({"tp": 2}), _message, "swapped_calls_of_one_shape", 1, before, env={"TPCORE_CHECK": "warmup"}
    )
    assert messages[0] == messages[1]
    assert re.search(r"rank 0: #\d+ all_reduce .* in accuracy\n  rank 1: #\d+ all_reduce .* in loss", messages[0])


def _swapped_in_each_step(ctx: ParallelContext) -> str:
    comm = ctx.comm("tp")
    _advance(comm, _CHECKED)
    steps = (swapped_calls_of_one_shape(comm, ctx.rank == 1) for _ in range(2 * 17))
    return said(CollectiveMismatchError, lambda: list(steps))


def test_calls_that_are_swapped_in_each_step_are_found_on_every_road(pool: OverRoad) -> None:
    for message in pool.run(Mesh({"tp": 2}), _swapped_in_each_step, env=WARMUP):
        assert "in accuracy" in message
        assert "in loss" in message


def _swapped_layers(ctx: ParallelContext, how: str, before: int) -> str:
    """Two layers of one shape in another order on rank 1, in a loop or in the branches of an ``if``."""
    torch.manual_seed(0)
    one, two = (tpcore.RowParallelLinear(4, 4) for _ in range(2))
    copied = copy.deepcopy(two)
    if how == "a layer more on rank 1" and ctx.rank:
        tpcore.RowParallelLinear(4, 4)
    _advance(ctx.comm("tp"), before)
    x, odd = torch.ones(4), ctx.rank == 1
    try:
        for _ in range(1 if not before else 2 * 17):
            if how == "branches":
                y = one(x) if odd else two(x)
            else:
                for layer in {"loop": (one, two), "copies": (two, copied)}.get(how, ())[:: -1 if odd else 1]:
                    y = layer(x)
                for layer in (one, two) if how == "a layer more on rank 1" else ():
                    y = layer(x)
    except CollectiveMismatchError as e:
        return str(e)
    return f"no error {y.shape}"


@pytest.mark.parametrize("before", [0, _CHECKED])
@pytest.mark.parametrize("how", ["loop", "branches", "copies"])
def test_swapped_layers_are_found(pool: OverRoad, how: str, before: int) -> None:
    numbers = {"loop": (1, 2), "branches": (2, 1), "copies": (2, 3)}[how]
    for message in pool.run(Mesh({"tp": 2}), _swapped_layers, how, before, env=WARMUP):
        for rank, number in enumerate(numbers):
            assert re.search(rf"rank {rank}: #\d+ all_reduce .* in _swapped_layers, layer {number} ", message)


def test_layers_that_a_rank_has_made_alone_are_no_swapped_ones(pool: OverRoad) -> None:
    """The numbers of its later layers are others than those of the same layers elsewhere."""
    texts = pool.run(Mesh({"tp": 2}), _swapped_layers, "a layer more on rank 1", 0, env=WARMUP)
    assert all("no error" in text for text in texts)


def _turns(ctx: ParallelContext) -> float:
    """Ranks at different places of the program, of which each is of one rank and source."""
    comm, total = ctx.comm("tp"), 0.0
    for _ in range(3):
        for src in range(comm.size):
            if ctx.rank == src:
                total += float(comm.broadcast(torch.ones(()), src))
            else:
                total += float(comm.broadcast(torch.zeros(()), src))
    return total


def test_branches_of_a_rank_are_no_swapped_calls(pool: OverRoad) -> None:
    assert pool.run(Mesh({"tp": 2}), _turns, env=WARMUP) == [6.0, 6.0]


def test_warmup_checks_the_first_512_of_each_group(pool: OverRoad) -> None:
    with pytest.raises(CollectiveMismatchError, match="#512 all_reduce sum"):
        pool.run(Mesh({"tp": 2}), _agree_then_differ, 511, env=WARMUP)
    with pytest.raises(CollectiveMismatchError, match="#513 all_reduce sum"):
        pool.run(Mesh({"tp": 2}), _agree_then_differ, 512, env=WARMUP)


def _other_kinds_of_four_bytes(ctx: ParallelContext) -> None:
    """Which gloo completes."""
    ctx.comm("tp").all_gather(torch.ones(1, dtype=torch.float32 if ctx.rank == 0 else torch.int32), 0)


def test_off_checks_nothing(pool: OverRoad) -> None:
    """Over shared memory each call is compared: it costs nothing there."""
    where = r"#\d+ all_gather .* at .*test_gloo_mismatch\.py:\d+ in _other_kinds_of_four_bytes"
    with pytest.raises(CollectiveMismatchError, match=where) if pool.shared else nullcontext():
        pool.run(Mesh({"tp": 2}), _other_kinds_of_four_bytes, env={"TPCORE_CHECK": "off"})


def _settings_differ(ctx: ParallelContext) -> str:
    with changed({"TPCORE_CHECK": "0" if ctx.rank else "1"}):
        return said(ValueError, lambda: GlooBackend().start(20.0))


def test_ranks_that_would_check_different_calls_do_not_start(pool: OverRoad) -> None:
    for text in pool.run(Mesh({"tp": 2}), _settings_differ):
        assert re.search(r"TPCORE_CHECK must be the same on all ranks; .* rank 0: all, rank 1: 0", text)


def _other_partition(ctx: ParallelContext) -> str:
    mesh = Mesh({"dp": 2, "tp": 2}) if ctx.rank == 2 else Mesh({"dp": 1, "tp": 4})
    return said(CollectiveMismatchError, lambda: ctx.backend.comm(mesh.group("tp"), ctx.rank))


def test_ranks_that_make_different_groups(pool: OverRoad) -> None:
    for text in pool.run(Mesh({"tp": 4}), _other_partition):
        assert "ranks 0 and 2 disagree on the next groups to make" in text
        assert "rank 2: ((0, 1), (2, 3))" in text
