"""Calls drawn at random find backends that are wrong in a corner, and pass the tests that have a list."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import pytest
import torch
from faults import Faults, Full, Kit, first_of, found, run_on, summed
from torch import Tensor

from tpcore.comm.transport import Op, Pending
from tpcore.layout.mesh import Mesh
from tpcore.testing.kit import drawn
from tpcore.testing.threads import ThreadTransport

FAULTS = Faults()
wrong = functools.partial(FAULTS.wrong, base=Full)
HALVES = (torch.float16, torch.bfloat16)


def no_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)


def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x), x)


def cut(x: Tensor, at: int) -> Tensor:
    """Zeros from element ``at`` on."""
    x = x.clone()
    x.view(-1)[at:] = 0
    return x


def memory_of(x: Tensor) -> Tensor:
    """As stored: without a lazy negation or conjugation."""
    return (-x.detach() if x.is_neg() else x.detach().conj()).clone()


def towards_zero(t: ThreadTransport, x: Tensor, op: str) -> Tensor:
    total = summed([y.float() for y in t.exchange(op, x)])
    return (total.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def half_up(t: ThreadTransport, x: Tensor, op: str) -> Tensor:
    total = summed([y.float() for y in t.exchange(op, x)])
    up = ((total.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)
    return torch.where(total.isfinite(), up, total).bfloat16()


def count(t: Any, key: object) -> int:
    seen: dict[object, int] = vars(t).setdefault("seen", {})
    seen[key] = seen.get(key, 0) + 1
    return seen[key]


# -- numbers, from a size on -------------------------------------------------------------------------------
wrong(
    "test_any_call all_reduce",
    NaNIsLostInMaximaFrom64Elements=lambda t, right, x, op, _: (
        op == "max" and x.is_floating_point() and x.numel() >= 64 and right(no_nan(x), op, False)
    ),
    DenormalSumsAreZeroFrom64Elements=lambda t, out, x, op, _: (
        op == "sum" and x.dtype is torch.float32 and x.numel() >= 64 and flushed(out)
    ),
    HalvesSaturateFrom64Elements=lambda t, out, x, op, _: (
        op == "sum" and x.dtype is torch.float16 and x.numel() >= 64 and out.nan_to_num(torch.nan)
    ),
    BytesAreSignedIn64Elements=lambda t, right, x, op, _: (
        op == "max"
        and x.dtype is torch.uint8
        and x.numel() >= 64
        and right(x.view(torch.int8), op, False).view(x.dtype)
    ),
    BytesSaturateAt127=lambda t, out, x, op, donate: x.dtype is torch.uint8 and x.numel() > 64 and out.clamp(max=127),
    SumsOfBfloat16AreCutOff=lambda t, x, op, _: (
        op == "sum" and x.dtype is torch.bfloat16 and x.numel() <= 4096 and towards_zero(t, x, op)
    ),
    TiesOfBfloat16GoUp=lambda t, x, op, donate: op == "sum" and x.dtype is torch.bfloat16 and half_up(t, x, op),
    WholeNumbersAbove2To53AreDoubles=lambda t, right, x, op, _: (
        x.dtype is torch.int64 and x.numel() > 1024 and right(x.double(), op, False).long()
    ),
)
wrong(
    "test_any_call all_gather",
    ForgetsTheSignOfZeroAbove8192=lambda t, out, x, dim: (
        x.dtype is torch.float32 and x.numel() > 8192 and torch.where(out == 0, 0.0, out)
    ),
    KnowsSixDims=lambda t, right, x, dim: right(x, min(dim, 5)) if x.shape[dim] > 1 else right(x, dim),
    LosesTheLastOfAnOddRow=lambda t, out, x, dim: x.numel() % 2 == 1 and x.numel() > 1000 and cut(out, out.numel() - 1),
    WrongAtExactly65Elements=lambda t, out, x, dim: x.numel() == 65 and cut(out, 64),
    WrongAboveAMebibyte=lambda t, out, x, dim: x.nbytes > 1 << 20 and cut(out, (1 << 20) // x.itemsize),
    ReadsWhatIsNegatedAsItIsStored=lambda t, right, x, dim: x.is_neg() and right(memory_of(x), dim),
    LosesWhatIsExpanded=lambda t, out, x, dim: 0 in x.stride() and x.numel() > 64 and torch.zeros_like(out),
    LosesWhatIsInAGraph=lambda t, out, x, dim: x.requires_grad and x.numel() > 8192 and torch.zeros_like(out),
)
# -- arguments, from a size on -----------------------------------------------------------------------------
wrong(
    "test_any_call broadcast",
    SendsFromTheFirstAbove256KiB=lambda t, right, x, src: right(x, 0 if x.nbytes > 1 << 18 else src),
)
wrong(
    "test_any_call permute",
    NobodyReceivesSomethingAbove8192=lambda t, out, x, to: (
        t.index not in to and x.numel() > 8192 and x.detach().clone()
    ),
)
wrong(
    "test_any_call reduce_scatter",
    LosesTheTailOfAnOddChunk=lambda t, out, x, dim: (
        out.numel() % 2 == 1 and out.numel() > 1000 and cut(out, out.numel() - 1)
    ),
)
wrong(
    "test_any_call all_to_all",
    TradesLargeOnesInReverse=lambda t, out, x, split, concat: (
        x.nbytes > 1 << 18 and torch.cat(out.chunk(t.size, concat)[::-1], concat)
    ),
    WrongIfBothDimsAreTheLastOfSix=lambda t, out, x, split, concat: (
        split == concat == x.ndim - 1 >= 5 and x.numel() > 64 and torch.zeros_like(out)
    ),
)
# -- switches and what is under way ------------------------------------------------------------------------
wrong(
    "test_any_call all_reduce",
    DonatedMaximaAreSums=lambda t, right, x, op, donate: right(x, "sum" if donate else op, donate),
    OverwritesWhatIsBesideADonatedSlice=lambda t, out, x, op, donate: (
        donate and x.storage_offset() > 8 and beside(x, out)
    ),
)
wrong(
    "test_any_call start_all_reduce",
    StartedDonatedMaximaAreSums=lambda t, x, op, donate: donate and op == "max" and done(t.all_reduce(x, "sum", False)),
    StartedMaximaAreReadAtTheWait=lambda t, x, op, _: (
        op == "max" and x.dtype in HALVES and lazily(t.all_reduce(x, op, False), x)
    ),
    KeepsEightUnderWay=lambda t, x, op, donate: ninth(t, t.all_reduce(x, op, False)),
    WaitsInItsOwnThreadAlone=lambda t, x, op, donate: of_this_thread(t.all_reduce(x, op, False)),
)
wrong(
    "test_any_call start_reduce_scatter",
    ASecondWaitIsEmpty=lambda t, x, dim, donate: donate and twice(t.reduce_scatter(x, dim)),
)
wrong("test_any_call start_permute", TheLatestToStartIsFinishedForAll=lambda t, x, to: latest(t, t.permute(x, to)))
# -- calls like the one before -----------------------------------------------------------------------------
wrong(
    "test_any_call all_gather",
    TheSecondOfAShapeIsTheFirst=lambda t, out, x, dim: (
        x.numel() > 1 and second_as_first(t, out, (x.shape, x.dtype, dim))
    ),
    PlansByShapeForgetTheMode=lambda t, out, x, dim: x.numel() > 64 and only_in_one_mode(t, out, x.shape),
)
wrong(
    "test_under_way",
    of="all_gather",
    KeepsAlternateResults=lambda t, out, x, dim: (
        vars(t).setdefault(f"{out.shape} {out.dtype}", out).copy_(out)
        if x.numel() > 8 and not out.is_inference()
        else out
    ),
)


def second_as_first(t: Any, out: Tensor, key: object) -> Tensor:
    kept = vars(t).setdefault(f"first {key}", out.clone())
    return kept.clone() if count(t, key) == 2 else out


def only_in_one_mode(t: Any, out: Tensor, key: object) -> Tensor:
    inside = torch.is_inference_mode_enabled()
    return out if vars(t).setdefault(f"mode {key}", inside) == inside else torch.zeros_like(out)


def beside(x: Tensor, out: Tensor) -> Tensor:
    x.detach().as_strided((1,), (1,), x.storage_offset() - 1).fill_(1)
    return out


def done(out: Tensor) -> Pending:
    return lambda: out


def lazily(out: Tensor, x: Tensor) -> Pending:
    return lambda: torch.maximum(out, x.detach())


def twice(out: Tensor) -> Pending:
    seen: list[int] = []
    return lambda: (seen.append(0), out if len(seen) == 1 else torch.zeros_like(out))[1]


def ninth(t: Any, out: Tensor) -> Pending:
    """A ring of eight results."""
    ring, turn = vars(t).setdefault("ring", [None] * 8), count(t, "starts")
    ring[turn % 8] = out
    return lambda: ring[turn % 8]


def latest(t: Any, out: Tensor) -> Pending:
    vars(t)[f"last {out.shape}"] = out
    return lambda: vars(t)[f"last {out.shape}"] if out.numel() else out


def of_this_thread(out: Tensor) -> Pending:
    mine = threading.get_ident()
    return lambda: out if threading.get_ident() == mine or out.numel() < 64 else torch.zeros_like(out)


@FAULTS.mutant("test_under_way", Full)
class CountsWhatIsUnderWay(ThreadTransport):
    """A broadcast is lost while two sums are under way."""

    pending = 0

    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        out = self.all_reduce(x, op, donate)
        self.pending += 1

        def wait() -> Tensor:
            self.pending = 0
            return out

        return wait

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        out = super().broadcast(x, src)
        return torch.zeros_like(out) if self.pending > 1 else out


@FAULTS.mutant("test_under_way_in_groups", Full)
class WrongInAPartOfTheWorld(ThreadTransport):
    """For numbers of two bytes, and not in the world's own group."""

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        out = super().all_to_all(x, split_dim, concat_dim)
        return torch.zeros_like(out) if self.size < self._world.size and x.itemsize == 2 else out


class OnTwo(Kit):
    worlds = (2,)


class OnThree(Kit):
    worlds = (3,)


@FAULTS.mutant("test_any_call all_reduce", Full)
class WrongInGroupsThatAreNoPowerOfTwo(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        odd = math.log2(self.size) % 1 and x.numel() > 8192
        return cut(out, 8192) if odd else out


@FAULTS.mutant("test_any_call all_reduce", Full)
class SumsFromItselfOnAbove64(ThreadTransport):
    """Of three ranks' numbers the last bits depend on the order."""

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        every = self.exchange(f"{op}", x)
        turned = every[self.index :] + every[: self.index]
        own = op == "sum" and x.dtype is torch.float32 and x.numel() > 64
        return summed(turned) if own else (summed(every) if op == "sum" else torch.stack(every).amax(0))


KINDS: dict[str, type[Kit]] = {
    "WrongInGroupsThatAreNoPowerOfTwo": OnThree,
    "SumsFromItselfOnAbove64": OnThree,
    "WrongInAPartOfTheWorld": Kit,
}


@pytest.mark.parametrize("name", first_of(FAULTS, "test_under_way", "test_under_way_in_groups", one_in=3))
def test_the_kit_finds_the_fault(name: str) -> None:
    caught_by, cls = FAULTS[name]
    assert found(caught_by, cls, KINDS.get(name, OnTwo))


def test_a_seed_draws_the_same_calls_and_the_message_names_it() -> None:
    """And all that an author needs: the call, the rank, and the first number that is wrong."""
    cls = FAULTS["CountsWhatIsUnderWay"][1]
    first, again, other = (
        run_on(cls)(Mesh({"dp": 1, "tp": 2}), drawn.under_way, seed, 1, 1 << 13, ()) for seed in (1, 1, 2)
    )
    assert first == again != other
    said = first[0][0]
    assert "broadcast src=" in said
    assert " on rank 0 is [0" in said
    assert said.endswith("draw it again with --kit-seed=1")
