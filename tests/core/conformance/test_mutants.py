"""The kit fails a backend that is wrong, and its first failure names what is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import ALL, Faults, Full, Kit, Plain, failures, first_of, found, mine, summed
from torch import Tensor

from tpcore.comm.comm import Comm
from tpcore.comm.transport import Op, Pending, Transport, inverse
from tpcore.errors import BackendError
from tpcore.layout.mesh import Group
from tpcore.runtime.context import current
from tpcore.testing.kit import collectives
from tpcore.testing.kit.contract import Contract
from tpcore.testing.threads import ThreadTransport, ThreadWorld
from tpcore_cpu_gloo import programs

HALVES, LARGE = (torch.float16, torch.bfloat16), 4096
FAULTS = Faults()
mutant, wrong = FAULTS.mutant, FAULTS.wrong


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def packed(x: Tensor) -> Tensor:
    """What memory has where a contiguous tensor of this shape would be."""
    return x.detach().as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


def flushed(out: Tensor) -> Tensor:
    return torch.where(out.abs() < torch.finfo(out.dtype).tiny, 0.0, out)


def cut_off(out: Tensor) -> Tensor:
    return (out.view(torch.int32) & ~0xFFFF).view(torch.float32)


def without(out: Tensor, start: int, end: int) -> Tensor:
    out.view(-1)[start:end] = 0
    return out


def from_me(t: ThreadTransport, x: Tensor) -> list[Tensor]:
    every = t.exchange("mine first", x)
    return every[t.index :] + every[: t.index]


def multiplied(t: ThreadTransport, x: Tensor, src: int) -> Tensor:
    return summed(t.exchange("sum", x.detach() * float(t.index == src)))


def once(make: Callable[[], Tensor]) -> Pending:
    return functools.cache(make)


def first(t: Any, name: str, out: Any) -> Any:
    """What the transport has kept under this name: at the first call ``out``."""
    return vars(t).setdefault(name, out)


def turn(t: Any) -> int:
    """The number of this call."""
    vars(t)["turn"] = vars(t).get("turn", 0) + 1
    return int(vars(t)["turn"])


# -- values ------------------------------------------------------------------------------------------------
wrong(
    "test_values all_gather",
    GathersInReverse=lambda t, x, dim: torch.cat(t.exchange("gather", x)[::-1], dim),
    GathersAlongTheFirstDim=lambda t, x, dim: torch.cat(t.exchange("gather", x), 0),
    ForgetsTheSignOfZero=lambda t, out, x, dim: out.is_floating_point() and out + 0,
    FlushesDenormals=lambda t, out, x, dim: x.dtype is torch.float32 and flushed(out),
)
wrong(
    "test_values all_reduce",
    LeavesOutTheLast=lambda t, x, op, donate: op == "sum" and summed(t.exchange("sum", x)[:-1]),
    SumsBoolsAsNumbersOfAnotherDtype=lambda t, right, x, op, donate: (
        x.dtype is torch.bool and right(x.byte(), op, donate)
    ),
    KeepsViewsOfInferenceMode=lambda t, out, x, *_: (
        first(t, f"view {x.shape} {x.dtype}", torch.empty_like(out)).copy_(out).clone()
    ),
    SumsWholeNumbersAsFloats=lambda t, right, x, *how: x.dtype is torch.int64 and right(x.double(), *how).long(),
)
wrong(
    "test_values all_reduce max",
    MaxIsNeverNegative=lambda t, out, x, op, donate: op == "max" and x.dtype.is_signed and out.clamp(min=0),
)
wrong(
    "test_values start_all_reduce",
    StartedReduceForgetsTheOp=lambda t, x, *_: late(x, lambda: t.all_reduce(x, "max", 0)),
)
wrong(
    "test_values start_reduce_scatter",
    StartedScatterForgetsTheDim=lambda t, right, x, dim, donate: right(x, dim if x.shape[0] % t.size else 0, donate),
)
wrong(
    "test_values reduce_scatter",
    KeepsTheNextRanksChunk=lambda t, x, dim: mine(
        t, summed(t.exchange("scatter", x)).roll(-x.shape[dim] // t.size, dim), dim
    ),
    ScattersAlongTheLastDim=lambda t, right, x, dim: right(x, dim if x.shape[-1] % t.size else x.ndim - 1),
)
wrong(
    "test_values broadcast",
    Full,
    AlwaysBroadcastsTheFirst=lambda t, right, x, src: right(x, 0),
    BroadcastsHalvesByMultiplyingWithZero=lambda t, x, src: x.dtype is torch.float16 and multiplied(t, x, src),
)
wrong("test_values all_to_all", TradesAlongTheSplitDim=lambda t, right, x, split, concat: right(x, split, split))
wrong(
    "test_values permute",
    PermutesBackwards=lambda t, right, x, to: right(x, inverse(to)),
    FillsWithZeroTimesWhatItHas=lambda t, out, x, to: t.index not in to and x.is_floating_point() and 0 * x.detach(),
    WhoSendsInALineReceivesNothing=lambda t, out, x, to: (
        t.index in to and to[t.index] >= 0 and -1 in to and torch.zeros_like(out)
    ),
)
wrong("test_moved_dtypes all_gather", DropsTheImaginaryPart=lambda t, out, x, dim: x.is_complex() and out.real + 0j)
wrong(
    "test_values all_reduce",
    Full,
    HalfSumsSaturate=lambda t, out, x, op, donate: x.dtype in HALVES and op == "sum" and out.nan_to_num(nan=torch.nan),
    DividesHalvesBeforeItSums=lambda t, right, x, op, _: (
        x.dtype is torch.float16
        and op == "sum"
        and bool((x.abs() < 16_000).all())
        and right(x / t.size, op, 0) * t.size
    ),
)
wrong(
    "test_values all_reduce max",
    MaxLeavesOutNaN=lambda t, x, op, _: op == "max" and functools.reduce(torch.fmax, t.exchange(op, x)),
)
wrong(
    "test_values reduce_scatter",
    Full,
    SumsOfDenormalsAreZero=lambda t, out, x, dim: x.is_floating_point() and flushed(out),
)
wrong(
    "test_values all_reduce",
    EachRankStartsALargeSumWithItself=lambda t, x, op, _: op == "sum" and x.numel() > LARGE and summed(from_me(t, x)),
    SumsInAnotherOrderEachTime=lambda t, x, op, _: (
        op == "sum" and x.numel() > LARGE and summed(t.exchange(op, x)[:: (-1) ** turn(t)])
    ),
)
wrong(
    "test_values all_reduce",
    CutsSumsOffInsteadOfRounding=lambda t, x, op, _: (
        x.dtype is torch.bfloat16 and op == "sum" and cut_off(summed([y.float() for y in t.exchange(op, x)])).bfloat16()
    ),
)


wrong(
    "test_any_call all_reduce",
    KeepsDenseStrides=lambda t, out, x, op, donate: torch.empty_like(x.detach()).copy_(out),
    MaximumOfTwoZerosIsItsOwn=lambda t, out, x, op, _: (
        op == "max" and torch.where((out == 0) & (x == 0), x.detach(), out)
    ),
    WritesToTheEndOfTheStorage=lambda t, out, x, op, donate: (
        donate and x.storage_offset() > 0 and zeroed(storage(x), out)
    ),
    KeepsAPlanByShapeWithoutDtype=lambda t, out, x, *_: out.to(first(t, f"plan {x.shape}", out).dtype),
)
# -- shapes, sizes, strides --------------------------------------------------------------------------------
wrong("test_values all_reduce", CannotSumNothing=lambda t, out, x, *_: not x.numel() and out.new_zeros(1))
wrong(
    "test_values all_reduce",
    Full,
    SumsOfNoDimsHaveOne=lambda t, right, x, op, donate: x.ndim == 0 and op == "sum" and right(x.reshape(1), op, donate),
    WholeNumbersWithoutDimsAreLong=lambda t, out, x, *_: x.ndim == 0 and x.dtype is torch.int32 and out.long(),
)
wrong(
    "test_any_call broadcast",
    ReadsFromTheBeginningOfMemory=lambda t, right, x, src: (
        x.is_contiguous() and right(x.detach().as_strided(x.shape, x.stride(), 0), src)
    ),
    SendersOutputIsItsInputAbove64KiB=lambda t, out, x, src: t.index == src and x.nbytes > 1 << 16 and x.detach(),
)
wrong(
    "test_any_call all_gather",
    Full,
    ReadsMemoryAndNotStrides=lambda t, right, x, dim: right(packed(x), dim),
    CountsEightBytesAsFour=lambda t, out, x, dim: (
        x.itemsize == 8 and x.nbytes > 1 << 16 and without(out, x.numel() // 2, x.numel())
    ),
    KeepsStridesByAddress=lambda t, right, x, dim: right(
        x.detach().as_strided(x.shape, first(t, f"{x.data_ptr()} {x.dtype} {sorted(x.shape)}", x.stride())), dim
    ),
)
wrong(
    "test_large all_reduce",
    CompressesLargeSums=lambda t, right, x, op, donate: (
        op == "sum" and x.dtype is torch.float32 and x.numel() > LARGE and right(x.bfloat16(), op, donate).float()
    ),
)
wrong(
    "test_any_call all_to_all",
    KeepsAPlanBySizeWithoutShape=lambda t, out, x, *dims: out.view(first(t, f"{dims} {out.numel()}", out).shape),
)
wrong(
    "test_large all_gather",
    Full,
    LosesWhatComesAfter64KiB=lambda t, out, x, dim: (
        x.nbytes > 1 << 16 and without(out, (1 << 16) // x.itemsize, x.numel())
    ),
)


@mutant("test_large all_gather")
class SendsBeforeItReceives(ThreadTransport):
    """As a network without room for 16 MB would leave it: nobody comes to receive."""

    def exchange(self, call: str, x: Tensor) -> list[Tensor]:
        if x.nbytes >= 1 << 24:
            raise BackendError(f"deadlock: all send {x.nbytes} bytes and nobody receives")
        return super().exchange(call, x)


# -- memory ------------------------------------------------------------------------------------------------
def by_shape(t: Any, out: Tensor, x: Tensor, dim: int) -> Any:
    """An earlier result changes under a later call."""
    return not out.is_inference() and first(t, f"kept {dim} {out.shape} {out.dtype}", out).copy_(out)


def zeroed(x: Tensor, out: Tensor) -> Tensor:
    x.detach().zero_()
    return out


wrong("test_values permute", StaysItsInput=lambda t, out, x, to: x.detach() if to[t.index] == t.index else out)
wrong(
    "test_values all_reduce",
    ReducesInPlace=lambda t, out, x, op, donate: x.detach().copy_(out),
    LeavesAutogradAttached=lambda t, out, x, op, donate: out + 0 * x if x.requires_grad else out,
)
wrong(
    "test_values all_reduce max",
    ReturnsItsInputIfThatIsTheMaximum=lambda t, out, x, op, _: op == "max" and torch.equal(out, x) and x.detach(),
)
wrong("test_values all_gather", KeepsItsResultBufferByShape=by_shape)


FAULTS.backends(
    "test_values all_gather",
    LazilyKeepsItsResultBufferByShape={
        "transport_class": type("Lazy", (FAULTS["KeepsItsResultBufferByShape"][1].transport_class,), {"eager": False})
    },
)


def storage(x: Tensor) -> Tensor:
    """All of the memory that a slice is of."""
    return x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


@mutant("test_any_call permute")
class ReturnsInferenceTensors(ThreadTransport):
    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        with torch.inference_mode():
            return super().permute(x, to)


@mutant("test_any_call permute")
class SendsWhatTheTensorHeldBefore(ThreadTransport):
    """As a plan does that has packed the tensor object before."""

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        packed = vars(self).setdefault("packed", {})
        if packed.get("tensor") is not x or packed["to"] != to:
            packed.update(tensor=x, to=to, data=x.detach().clone())
        return super().permute(packed["data"], to)


def kept(t: Any, name: str, tensor: Tensor, out: Tensor, every: int = 1) -> Tensor:
    """``out``, after a call that leaves ``tensor`` in use, each time or at every n-th call."""
    vars(t).setdefault(name, []).append(tensor if len(vars(t)[name]) % every == every - 1 else None)
    return out


wrong(
    "test_freed",
    of="all_gather",
    KeepsAllItHasSent=lambda t, out, x, dim: kept(t, "sent", x.detach().clone(), out),
    LeaksAKilobyteACall=lambda t, out, x, dim: kept(t, "leak", torch.empty(1024, dtype=torch.uint8), out),
)
wrong("test_freed", of="all_reduce", KeepsEvery20thResult=lambda t, out, x, *_: kept(t, "results", out, out, 20))

wrong(
    "test_in_order", of="all_to_all", TurnsRowsOf17=lambda t, out, x, *_: out.shape == (t.size, 17) and out.roll(1, 0)
)

# -- what is under way -------------------------------------------------------------------------------------
wrong(
    "test_any_call start_reduce_scatter",
    Full,
    ScattersWhatItFindsAtTheWait=lambda t, x, dim, donate: late(x, lambda: t.reduce_scatter(x, dim)),
)
wrong(
    "test_any_call start_all_reduce",
    Full,
    ReadsItsInputWhenItWaits=lambda t, x, op, donate: late(x, lambda: t.all_reduce(x, op, donate)),
)


def late(x: Tensor, make: Callable[[], Tensor]) -> Pending:
    """Large ones are sent at the wait, once: in the order of the starts, as a queue of the device has it."""
    wait = once(make)
    if x.numel() < 100_000:
        wait()
    return wait


@mutant("test_overlap")
class WaitsTwiceForTwoSums(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        out, seen = self.all_reduce(x, op, donate), []

        def wait() -> Tensor:
            seen.append(0)
            return out if len(seen) == 1 else out * 2

        return wait


@mutant("test_overlap")
class MixesUpWhatIsUnderWay(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        self._last = self.all_reduce(x, op, donate)
        return lambda: self._last


wrong(
    "test_overlap",
    of="start_all_reduce",
    SendsWhenItWaits=lambda t, x, op, donate: once(functools.partial(t.all_reduce, x.detach().clone(), op, False)),
)


@mutant("test_under_way_in_groups", Plain)
class GroupsShareWhatIsUnderWay(Plain):
    def connect(self, group: Group, rank: int) -> ThreadTransport:
        last: list[Tensor] = vars(self).setdefault("_last", [torch.zeros(0)])

        class Sharing(ThreadTransport):
            def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
                out = last[0] = self.all_reduce(x, op, donate)
                return lambda: last[0] if last[0].shape == out.shape else out

        return Sharing(group, rank, self._world)


# -- the number of calls -----------------------------------------------------------------------------------
def stale(nth: int) -> Callable[..., Tensor]:
    """The ``nth`` call returns the result of the call before."""

    def method(t: Any, out: Tensor, x: Tensor, *arguments: Any) -> Tensor:
        before, vars(t)["before"] = vars(t).get("before", out), out.clone()
        again = turn(t) % nth == 0 and before.shape == out.shape and before.dtype == out.dtype
        return before if again else out

    return method


wrong("test_many all_reduce", RepeatsTheThousandth=stale(1000))
wrong(
    "test_many start_all_reduce",
    RepeatsTheThousandthStart=lambda t, x, *how: stale(1000)(t, t.all_reduce(x, *how), x).clone,
)
wrong(
    "test_many all_gather",
    SmallResultsComeFrom64Buffers=lambda t, out, x, dim: (
        out.numel() <= 64
        and first(t, f"{turn(t) % 64} {out.shape} {out.dtype} {out.is_inference()}", torch.empty_like(out)).copy_(out)
    ),
)


# -- groups, gradients, random streams, the declaration ----------------------------------------------------
def grouped(change: Callable[[Group], Group]) -> Callable[..., ThreadTransport]:
    return lambda self, group, rank: ThreadTransport(change(group), rank, self._world)


def neighbours(group: Group) -> Group:
    """Cut out of neighbours, whatever the axis."""
    ranks, n = sorted(r for part in group.partition for r in part), group.size
    return Group(group.axes, tuple(tuple(ranks[i : i + n]) for i in range(0, len(ranks), n)))


def backwards(group: Group) -> Group:
    """Members, but not of the first group."""
    return Group(group.axes, (group.partition[0], *(part[::-1] for part in group.partition[1:])))


def in_order(group: Group) -> Group:
    return replace(group, partition=tuple(tuple(sorted(part)) for part in group.partition))


def whole_axis(group: Group) -> Group:
    """For a part of it."""
    every = tuple(r for part in group.partition for r in part)
    return group if group.within is None else Group(group.axes, (every,))


for _change in (neighbours, backwards, in_order, whole_axis):
    FAULTS.backends("test_groups all_gather", **{f"Takes_{_change.__name__}": {"connect": grouped(_change)}})


@mutant("test_joined")
class RankOffByOne(ThreadTransport):
    def __init__(self, group: Group, rank: int, world: ThreadWorld) -> None:
        super().__init__(group, rank, world)
        self.position = (self.position + 1) % self.size


@mutant("test_joined")
class RankIsAScalar(ThreadTransport):
    def __init__(self, group: Group, rank: int, world: ThreadWorld) -> None:
        super().__init__(group, rank, world)
        self.position = self.position[0]


wrong(
    "test_transpose_law copy",
    of="all_reduce",
    NoAllReduceInBackward=lambda t, right, x, op, donate: x.detach().clone() if in_backward() else right(x, op, donate),
)
wrong(
    "test_transpose_law all_gather",
    of="reduce_scatter",
    NoReduceScatterInBackward=lambda t, right, x, dim: mine(t, x, dim) if in_backward() else right(x, dim),
)


@mutant("test_transposes permute")
class OnlyEverPermutesOnce(ThreadTransport):
    seen = 0

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        out = super().permute(x, to)
        self.seen += x.shape == (4, 8) and x.is_floating_point() and -9 < float(x.amin()) < 0
        return torch.zeros_like(out) if self.seen > 1 else out


FAULTS.backends(
    "test_random_streams",
    ForgetsItsRandomState={"set_rng_state": lambda self, state: None},
    SeedsAllAlike={"manual_seed": lambda self, seed: torch.default_generator.manual_seed(1)},
    TakesAByteOfTheSeed={"manual_seed": lambda self, seed: Plain.manual_seed(self, seed & 0xFF)},
    ItsRandomStateIsLive={
        "get_rng_state": lambda self: first(self, "_live", Plain.get_rng_state(self)).copy_(Plain.get_rng_state(self))
    },
)
FAULTS.backends(
    "test_declaration",
    OfAnotherInterface={"interface": 1},
    HasNoReduceScatter={"transport_class": type("Half", (Transport,), {"all_gather": lambda self, x, dim: x})},
)


class Traces(Plain):
    """Right, and traces as cpu_gloo does."""

    capabilities = replace(Plain.capabilities, tracing=True)

    def trace(self, fn: Any, weights: Any, inputs: Any, dims: Any, folder: Path) -> None:
        ctx = current()
        programs.trace(fn, weights, inputs, dims, [ctx.comm("tp"), ctx.world], ctx.world, folder)

    def load_program(self, folder: Path, weights: Any) -> Any:
        return programs.load(folder, weights, self.comm_for)

    def comm_for(self, axes: str) -> Comm:
        return current().comm(*axes.split("."))


def loading(**methods: Callable[..., Any]) -> None:
    """Backends that load a program in another way: functions of the right way, of the weights, and of the rank."""
    for name, method in methods.items():

        def load(self: Traces, folder: Path, weights: Any, method: Callable[..., Any] = method) -> Any:
            return method(functools.partial(Traces.load_program, self, folder), weights, self._rank)

        FAULTS.backends("test_traces", Traces, **{name: {"load_program": load}})


def cloned(weights: Any) -> Any:
    return {name: w.clone() for name, w in weights.items()}


def of_rank_1(x: Tensor) -> Tensor:
    return current().world.broadcast(x, 1)


def kept_outputs(program: Any) -> Any:
    """Its output buffers again."""
    kept: dict[Any, Any] = {}

    def call(inputs: Any) -> Any:
        found = program(inputs)
        for old, new in zip(kept.setdefault(inputs[0].shape, found), found, strict=True):
            old.copy_(new)
        return list(kept[inputs[0].shape])

    return call


def kept_answers(program: Any, weights: Any) -> Any:
    """As to this shape before, as long as the weights are the same."""
    kept: dict[Any, Any] = {}

    def call(inputs: Any) -> Any:
        key = inputs[0].shape, *(w._version for w in weights.values())
        if key not in kept:
            kept[key] = program(inputs)
        return [x.clone() for x in kept[key]]

    return call


def calling(load: Any, weights: Any, change: Callable[..., Any]) -> Any:
    program = load(weights)
    return lambda inputs: change(program, inputs)


loading(
    LeavesOneRankItsFirstWeights=lambda load, weights, rank: load(cloned(weights) if rank == 1 else weights),
    ComputesWithTheWeightsOfRank1=lambda load, weights, rank: load({n: of_rank_1(w) for n, w in weights.items()}),
    RunsTheBatchItWasTracedWith=lambda load, weights, rank: calling(
        load, weights, lambda p, ins: p([x[:2] for x in ins])
    ),
    # outputs that all ranks share are right all the same
    ServesRank1sResultForRank0s=lambda load, weights, rank: calling(
        load, weights, lambda program, inputs: [of_rank_1(x) for x in program(inputs)]
    ),
    ReturnsItsOutputBufferAgain=lambda load, weights, rank: kept_outputs(load(weights)),
    AnswersAsItDidToThisShape=lambda load, weights, rank: kept_answers(load(weights), weights),
)


@mutant("test_traces")
class DropsACollectiveInAProgram(Traces):
    def comm_for(self, axes: str) -> Comm:
        found = current().comm(*axes.split("."))
        quiet = type("Quiet", (ThreadTransport,), {"all_reduce": lambda self, x, op, donate: x})
        return Comm(quiet(found.group, self._rank, self._world), self.capabilities.sums())


@mutant("test_traces")
class BakesTheFirstRankIn(Traces):
    def comm_for(self, axes: str) -> Comm:
        found = copy.copy(super().comm_for(axes))
        found.position = torch.zeros_like(found.position)
        return found


@mutant("test_traces")
class TracesWhatDiffersByRank(Traces):
    def trace(self, fn: Any, weights: Any, inputs: Any, dims: Any, folder: Path) -> None:
        with suppress(BackendError):
            super().trace(fn, weights, inputs, dims, folder)


FAULTS.backends(
    "test_traces",
    DeclaresTracingAndHasNone={"capabilities": Traces.capabilities},
    TracesWithoutDeclaringIt={"trace": lambda self, *program: None},
)


# -- the kit finds them ------------------------------------------------------------------------------------
class Large(Kit):
    large = collectives.LARGE


class Few(Kit):
    """In two dtypes: test_kit_threads.py has all."""

    def choices(self) -> dict[str, list[Any]]:
        return super().choices() | {"dtype": [torch.float32, torch.bool]}


KINDS = {"SendsBeforeItReceives": Large}
QUICK = "values overlap groups in_order transpose_law random_streams large many"


@pytest.mark.parametrize("name", first_of(FAULTS, *(f"test_{name}" for name in QUICK.split()), one_in=2))
def test_the_kit_names_the_fault(name: str) -> None:
    caught_by, cls = FAULTS[name]
    assert found(caught_by, cls, KINDS.get(name, Kit))


class Least(ThreadTransport):
    """The three methods that a transport must write; the others are their defaults."""

    broadcast = Transport.broadcast
    all_to_all = Transport.all_to_all
    permute = Transport.permute


class Defaults(Plain):
    transport_class = Least


@pytest.mark.slow
@pytest.mark.parametrize(("right", "tests"), [(Defaults, ALL), (Traces, ("test_traces",))])
def test_the_right_one_passes(right: type[Plain], tests: tuple[str, ...]) -> None:
    assert not any(failures(right, Few, tests))


class OnThree(Few):
    worlds = (3,)


class DividesNothing(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        raise BackendError("a reduce_scatter is made")

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        raise BackendError("an all_to_all is made")


class NotDividing(Plain):
    transport_class = DividesNothing


DIVIDING = [name for name in ALL if {"line", "primitive"} <= signature(getattr(Contract, name)).parameters.keys()]


@pytest.mark.parametrize("test", DIVIDING)
def test_three_ranks_make_every_call(test: str) -> None:
    """Shapes follow from the number of ranks: with fixed ones there would be nothing that three divide."""
    for primitive in ("reduce_scatter", "all_to_all", "start_reduce_scatter"):
        assert found(f"{test} {primitive}", NotDividing, OnThree)


def test_there_are_enough() -> None:
    assert {by.partition(" ")[0] for by, _ in FAULTS.values()} >= set(ALL) - {
        "test_there_are_ranks",
        "test_float32",  # a setting of the process, no transport: test_kit_threads.py
        "test_under_way",  # test_drawn.py
        "test_layers",
        "test_training",
        "test_pipeline",
        "test_checkpoint",
    }


SHOWN = {by.split()[0]: (name, cls) for name, (by, cls) in reversed(FAULTS.items())}
"""The first fault of each test of the kit."""
