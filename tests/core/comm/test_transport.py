"""What comes with Comm for every backend: arguments, dtypes and calls are checked, and defaults are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import each_rank
from torch import Tensor

from tpcore.backend.interface import Capabilities
from tpcore.comm.comm import Comm
from tpcore.comm.transport import TABLE, Op, Transport
from tpcore.comm.wrapper import Checked, TransportWrapper
from tpcore.errors import CollectiveMismatchError
from tpcore.layout.mesh import Group, Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.kit import collectives
from tpcore.testing.threads import ThreadWorld


class Trusting(Transport):
    """The least that a plugin writes: three methods, no look at what others call."""

    def __init__(self, group: Group, rank: int, world: ThreadWorld) -> None:
        super().__init__(group, rank)
        self._meet = partial(world.exchange, self.members, rank)

    def _every(self, x: Tensor) -> list[Tensor]:
        """Any ranks meet, whatever they came for: as in most transports."""
        flat = x.detach().contiguous().view(-1).view(torch.uint8)
        room = int(max(self._meet("sizes", torch.tensor([flat.numel()]))))
        every = self._meet("bytes", F.pad(flat, (0, room - flat.numel())))
        return [t[: flat.numel()].clone().view(x.dtype).view(x.shape) for t in every]

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        every = torch.stack(self._every(x))
        return every.sum(0, dtype=x.dtype) if op == "sum" else every.amax(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._every(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.all_reduce(x, "sum", False).chunk(self.size, dim)[self.index].clone()


class TrustingBackend(ThreadBackend):
    transport_class = Trusting  # type: ignore[assignment]
    capabilities = Capabilities(dtypes=(torch.float32, torch.int64, torch.uint8))

    def connect(self, group: Group, rank: int) -> Transport:  # type: ignore[override]
        return Trusting(group, rank, self._world)


def raised_by_all(call: Callable[[Comm, int], Any], error: type[Exception]) -> list[str]:
    """What every rank is told, the calls of which must fail; the group works afterwards."""

    def rank(ctx: ParallelContext) -> str:
        comm = ctx.comm("tp")
        with pytest.raises(error) as caught:
            call(comm, ctx.rank)
        assert comm.all_reduce(torch.ones(1)).item() == comm.size
        return str(caught.value)

    return run_ranks(Mesh({"tp": 3}), rank, backend=TrustingBackend)


MISMATCHES: dict[str, Callable[[Comm, int], object]] = {
    "shape": lambda comm, rank: comm.all_reduce(torch.zeros(2 + rank // 2)),
    "shape of as many elements": lambda comm, rank: comm.all_gather(
        torch.zeros((3, 2) if rank == 1 else (2, 3)), 0
    ),
    "dtype": lambda comm, rank: comm.all_reduce(torch.zeros(2).to((torch.float32, torch.int64)[rank // 2])),
    "op": lambda comm, rank: comm.all_reduce(torch.zeros(2), "max" if rank else "sum"),
    "primitive": lambda comm, rank: comm.broadcast(torch.zeros(2), 0) if rank else comm.permute(
        torch.zeros(2), (1, 2, 0)
    ),
    "started": lambda comm, rank: comm.start_all_reduce(torch.zeros(2 + rank)),
    "started permute": lambda comm, rank: comm.start_permute(torch.zeros(2 + rank), (1, 2, 0)),
    "permutation": lambda comm, rank: comm.permute(torch.zeros(2), (1, 2, 0) if rank else (2, 0, 1)),
    "dims": lambda comm, rank: comm.all_to_all(torch.zeros(3, 3), int(rank == 1), 0),
}  # fmt: skip


@pytest.mark.parametrize("call", MISMATCHES.values(), ids=MISMATCHES)
def test_different_calls_are_an_error_on_every_rank(call: Callable[[Comm, int], object]) -> None:
    told = raised_by_all(call, CollectiveMismatchError)
    assert len(set(told)) == 1
    assert "disagree on their next collective" in told[0]
    assert "test_transport.py" in told[0]


def test_calls_after_the_first_ones_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_CHECK", "warmup")
    monkeypatch.setattr("tpcore.comm.signature._WARMUP", 2)

    done = [0, 0]

    def rank(ctx: ParallelContext) -> None:
        comm = ctx.comm("tp")
        for i in range(100):
            comm.all_gather(torch.zeros((2, 3) if ctx.rank and i == 6 else (3, 2)), 0)
            done[ctx.rank] += 1

    with pytest.raises(CollectiveMismatchError, match=r"rank 1: #7 all_gather dim 0 of float32 \[2, 3\] at"):
        run_ranks(Mesh({"tp": 2}), rank, backend=TrustingBackend)
    assert done == [2 + Checked.RUN - 1] * 2


def test_an_error_of_a_wrapped_call_names_the_primitive() -> None:
    for primitive in TABLE:
        with pytest.raises(TypeError, match=rf"^{primitive.name}\(\) missing"):
            getattr(TransportWrapper, primitive.name)()


def test_calls_are_not_compared_where_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_CHECK", "off")

    def rank(ctx: ParallelContext) -> None:
        ctx.comm("tp").all_gather(torch.zeros((2, 3) if ctx.rank else (3, 2)), 0)

    run_ranks(Mesh({"tp": 2}), rank, backend=TrustingBackend)


REFUSED: dict[str, tuple[Callable[[Comm, int], object], str]] = {
    "scatter": (lambda comm, rank: comm.reduce_scatter(torch.zeros(4), 0), "cannot split dim 0"),
    "trade": (lambda comm, rank: comm.all_to_all(torch.zeros(4, 3), 0, 1), "cannot split dim 0"),
    "dim": (lambda comm, rank: comm.all_gather(torch.zeros(3), 1), "no dim 1 in a tensor of shape"),
    "src": (lambda comm, rank: comm.broadcast(torch.zeros(3), 3), "no member 3"),
    "two to one": (lambda comm, rank: comm.permute(torch.zeros(3), (1, 1, 0)), "does not send from each"),
    "too few": (lambda comm, rank: comm.permute(torch.zeros(3), (1, 0)), "does not send from each"),
    "nobody": (lambda comm, rank: comm.permute(torch.zeros(3), (1, 2, 3)), "does not send from each"),
    "sum": (lambda comm, rank: comm.all_reduce(torch.zeros(3).double()), "cannot take the sum of torch.fl"),
    "max": (lambda comm, rank: comm.start_all_reduce(torch.zeros(3).bool(), "max"), "cannot take the max"),
    "chunk": (lambda comm, rank: comm.reduce_scatter(torch.zeros(3).half(), 0), "convert it to a wider"),
    "reduction": (lambda comm, rank: comm.all_reduce(torch.zeros(3), "min"), "no reduction 'min'"),
}  # type: ignore[arg-type]


@pytest.mark.parametrize("what", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_exchanged(what: str) -> None:
    call, message = REFUSED[what]
    assert all(message in text for text in raised_by_all(call, ValueError))


@pytest.mark.parametrize("primitive", [p for p in collectives.PRIMITIVES if p != "all_reduce donate"])
def test_the_defaults_are_right(primitive: str) -> None:
    def rank(ctx: ParallelContext) -> list[str]:
        return collectives.right_values(ctx, primitive, torch.float32)

    assert run_ranks(Mesh({"tp": 3}), rank, backend=TrustingBackend) == [[]] * 3


@each_rank(tp=2)
def test_a_comm_has_a_position_and_no_rank(ctx: ParallelContext) -> None:
    """``if comm.rank == 0`` would make a program for each rank."""
    comm = ctx.comm("tp")
    assert (comm.position.tolist(), comm.position.dtype) == ([ctx.rank], torch.int64)
    with pytest.raises(AttributeError, match=r"a Comm has no rank: comm\.position.* use ctx\.rank, an int"):
        comm.rank  # noqa: B018  the access is the test


def test_a_member_to_whom_nobody_sends_gets_zeros_and_no_nan() -> None:
    def rank(ctx: ParallelContext) -> list[float]:
        x = torch.tensor([float("nan") if ctx.rank == 1 else 1.0])
        return ctx.comm("tp").permute(x, (1, None, None)).tolist()

    for backend in (TrustingBackend, ThreadBackend):
        assert run_ranks(Mesh({"tp": 3}), rank, backend=backend) == [[0.0], [1.0], [0.0]]
