"""Errors that all ranks raise together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpcore.errors import BackendError, CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.consensus import gather_bytes, together
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

Ranks = Callable[..., list[Any]]
MESH = Mesh({"dp": 1, "tp": 3})


def _gather(ctx: ParallelContext, data: list[bytes]) -> list[bytes]:
    return gather_bytes(data[ctx.rank], ctx.world)


@pytest.mark.parametrize(
    "data",
    [[b"", b"", b""], [b"a", b"", b"ccc"], ["é".encode(), bytes(range(256)), b"\0\0"], [b"x" * 100_000, b"y", b""]],
    ids=["empty", "uneven", "any bytes", "long"],
)
def test_everyones_bytes_in_group_order(ranks: Ranks, data: list[bytes]) -> None:
    assert ranks(MESH, _gather, data) == [data] * 3


def _fails(ctx: ParallelContext, errors: dict[int, Exception]) -> tuple[type, str] | None:
    try:
        with together(ctx):
            if ctx.rank in errors:
                raise errors[ctx.rank]
    except Exception as e:  # noqa: BLE001  what is raised is what is looked at
        ctx.world.all_reduce(torch.ones(1))  # every rank is still there, and in step
        return type(e), str(e)
    ctx.world.all_reduce(torch.ones(1))
    return None


@pytest.mark.parametrize("failing", [0, 2])
def test_one_fails_and_all_raise(ranks: Ranks, failing: int) -> None:
    got = ranks(MESH, _fails, {failing: ValueError("bad value")})
    for rank, outcome in enumerate(got):
        assert outcome == (ValueError, "bad value" if rank == failing else f"rank {failing}: bad value")


def test_several_fail_and_each_raises_its_own() -> None:
    errors = {1: KeyError("one"), 2: ValueError("two")}
    assert run_ranks(MESH, lambda ctx: _fails(ctx, errors)) == [
        (KeyError, repr("rank 1: 'one'")),
        (KeyError, "'one'"),
        (ValueError, "two"),
    ]


class OfTheUser(Exception):
    pass


KINDS: dict[str, tuple[Exception, type[Exception], str]] = {
    "of tpcore": (CheckpointError("key a"), CheckpointError, "rank 1: key a"),
    "no file": (
        FileNotFoundError(2, "No such file", "/x"),
        RuntimeError,
        "FileNotFoundError: rank 1: [Errno 2] No such file: '/x'",
    ),
    "of the user": (OfTheUser("mine"), RuntimeError, "OfTheUser: rank 1: mine"),
    "not of one message": (
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        RuntimeError,
        "UnicodeDecodeError: rank 1: 'utf-8' codec can't decode byte 0xff in position 0: bad",
    ),
    "without message": (ValueError(), ValueError, "rank 1: "),
    "not ascii": (ValueError("naïve ✓"), ValueError, "rank 1: naïve ✓"),
    "a path that is no text": (ValueError("/data/\udcff"), ValueError, "rank 1: /data/\\udcff"),
    "several lines": (ValueError("a\nb"), ValueError, "rank 1: a\nb"),
}
if sys.version_info >= (3, 11):
    KINDS["group"] = (
        ExceptionGroup("both", [ValueError("a")]),  # noqa: F821
        RuntimeError,
        "ExceptionGroup: rank 1: both (1 sub-exception)",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_ranks_raise_the_same_type_where_it_takes_a_message(kind: str) -> None:
    error, type_, text = KINDS[kind]
    got = run_ranks(MESH, lambda ctx: _fails(ctx, {1: error}))
    assert got[1] == (type(error), str(error))
    assert got[0] == got[2] == (type_, text)


def test_long_messages_are_cut() -> None:
    (_, text), *_ = run_ranks(MESH, lambda ctx: _fails(ctx, {1: ValueError("✓" * 10_000)}))
    assert 1000 < len(text) < 5000


def test_a_lost_rank_is_not_waited_for_again() -> None:
    def rank(ctx: ParallelContext) -> None:
        with together(ctx):
            raise BackendError("the ranks cannot talk")

    with pytest.raises(BackendError, match="cannot talk"):
        run_ranks(MESH, rank)


def test_alone() -> None:
    assert run_ranks(Mesh({"tp": 1}), lambda ctx: _fails(ctx, {0: ValueError("x")})) == [(ValueError, "x")]
    assert run_ranks(Mesh({"tp": 1}), lambda ctx: _fails(ctx, {})) == [None]
