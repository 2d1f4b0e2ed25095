"""The kit fails a backend that is wrong, and its first failure names what is."""

from __future__ import annotations

import copy
import functools
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import ALL, Kit, Plain, Registry, Sampled, failures, first_of, found, mine, summed
from test_mutants_limits import LIMITS
from test_mutants_rare import RARE
from torch import Tensor
from tpcore_cpu_gloo import programs

from tpcore.comm.comm import Comm
from tpcore.comm.transport import Op, Pending, Transport, inverse
from tpcore.errors import BackendError
from tpcore.layout.mesh import Group, Mesh
from tpcore.runtime.context import ParallelContext, current
from tpcore.testing import run_ranks
from tpcore.testing.kit.contract import Contract
from tpcore.testing.threads import ThreadTransport, ThreadWorld
from tpcore.testing.verify.report import EDGES, edge_rows


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


MUTANTS = Registry()
mutant = MUTANTS.mutant


@mutant("test_values all_gather")
class GathersInReverse(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.exchange("gather", x)[::-1], dim)


@mutant("test_values all_gather")
class GathersAlongTheFirstDim(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.exchange("gather", x), 0)


@mutant("test_values all_gather")
class GathersOnlyItself(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x.detach()] * self.size, dim)


@mutant("test_values all_reduce")
class SumIsMax(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return super().all_reduce(x, "max", donate)


@mutant("test_values all_reduce max")
class MaxIsSum(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return super().all_reduce(x, "sum", donate)


@mutant("test_values all_reduce")
class LeavesOutTheLast(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        peers = self.exchange("sum", x)
        return summed(peers[:-1]) if op == "sum" else torch.stack(peers).amax(0)


@mutant("test_values all_reduce")
class AveragesInsteadOfSumming(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        total = super().all_reduce(x, op, donate)
        return (total.double() / self.size).to(x.dtype) if op == "sum" else total


@mutant("test_values all_reduce")
class SumsBoolsAsNumbersOfAnotherDtype(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return super().all_reduce(x.to(torch.uint8) if x.dtype is torch.bool else x, op, donate)


@mutant("test_values all_reduce max")
class MaxStartsFromZeroOfOneRank(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        peers = self.exchange(op, x)
        return summed(peers) if op == "sum" else peers[0].clone()


@mutant("test_values start_all_reduce")
class StartedReduceForgetsTheOp(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        out = self.all_reduce(x, "max", donate)
        return lambda: out


@mutant("test_values start_reduce_scatter")
class StartedScatterForgetsTheDim(ThreadTransport):
    def start_reduce_scatter(self, x: Tensor, dim: int, donate: bool) -> Pending:
        out = self.reduce_scatter(x, 0) if x.shape[0] % self.size == 0 else self.reduce_scatter(x, dim)
        return lambda: out


@mutant("test_started")
class ScattersWhatItFindsAtTheWait(ThreadTransport):
    def start_reduce_scatter(self, x: Tensor, dim: int, donate: bool) -> Pending:
        done: list[Tensor] = []

        def wait() -> Tensor:
            if not done:
                done.append(self.reduce_scatter(x, dim))
            return done[0]

        if x.numel() < 100_000:
            wait()
        return wait


@mutant("test_values start_permute")
class StartedPermuteGoesBackwards(ThreadTransport):
    def start_permute(self, x: Tensor, to: tuple[int, ...]) -> Pending:
        out = self.permute(x, tuple(to.index(i) if i in to else -1 for i in range(len(to))))
        return lambda: out


@mutant("test_values reduce_scatter")
class KeepsTheNextRanksChunk(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        total = summed(self.exchange("reduce_scatter", x))
        return total.chunk(self.size, dim)[(self.index + 1) % self.size].contiguous()


@mutant("test_values reduce_scatter")
class ScattersWithoutReducing(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return mine(self, x.detach(), dim)


@mutant("test_values reduce_scatter")
class ScattersAlongTheLastDim(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        dim = x.ndim - 1 if x.shape[-1] % self.size == 0 else dim
        return super().reduce_scatter(x, dim)


@mutant("test_values broadcast")
class AlwaysBroadcastsTheFirst(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return super().broadcast(x, 0)


@mutant("test_values broadcast")
class BroadcastsFromTheNeighbour(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return super().broadcast(x, (src + 1) % self.size)


@mutant("test_values all_to_all")
class TradesInReverse(ThreadTransport):
    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        every = self.exchange("trade", x)[::-1]
        return torch.cat([mine(self, t, split_dim) for t in every], concat_dim)


@mutant("test_values all_to_all")
class TradesAlongTheSplitDim(ThreadTransport):
    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        return super().all_to_all(x, split_dim, split_dim)


@mutant("test_memory all_to_all")
class TradesIntoATransposedView(ThreadTransport):
    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        out = super().all_to_all(x, split_dim, concat_dim)
        return out.transpose(0, -1).contiguous().transpose(0, -1)


@mutant("test_values permute")
class PermutesBackwards(ThreadTransport):
    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        return super().permute(x, inverse(to))


@mutant("test_values permute")
class KeepsItsOwnWhereNobodySends(ThreadTransport):
    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        out = super().permute(x, to)
        return out if self.index in to else x.detach().clone()


@mutant("test_memory permute")
class StaysItsInput(ThreadTransport):
    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        out = super().permute(x, to)
        return x.detach() if to[self.index] == self.index else out


@mutant("test_transposes permute")
class OnlyEverPermutesOnce(ThreadTransport):
    seen = 0

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        out = super().permute(x, to)
        self.seen += x.shape == (4, 8) and x.is_floating_point() and -9 < float(x.amin()) < 0
        return torch.zeros_like(out) if self.seen > 1 else out


@mutant("test_moved_dtypes all_gather")
class DropsTheImaginaryPart(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        return torch.complex(out.real, torch.zeros_like(out.real)) if x.is_complex() else out


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


@mutant("test_strides all_gather")
class ReadsMemoryAndNotStrides(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if not x.is_contiguous():
            x = x.detach().as_strided(x.shape, torch.empty(x.shape).stride())
        return super().all_gather(x, dim)


@mutant("test_empty all_reduce")
class CannotSumNothing(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        return out if x.numel() else out.new_zeros(1)


@mutant("test_memory all_reduce")
class ReducesInPlace(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return x.detach().copy_(super().all_reduce(x, op, donate))


@mutant("test_memory reduce_scatter")
class ClearsItsInput(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        out = super().reduce_scatter(x, dim)
        x.detach().zero_()
        return out


@mutant("test_memory all_gather")
class ReturnsATransposedView(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        return out.transpose(0, -1).contiguous().transpose(0, -1)


@mutant("test_memory reduce_scatter")
class ReturnsASliceOfALargerTensor(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        total = summed(self.exchange("reduce_scatter", x))
        return total.chunk(self.size, dim)[self.index]


@mutant("test_memory all_gather")
class UsesOneBufferAgain(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        if x.shape != (4, 8, 4):
            return out
        if not hasattr(self, "_buffer"):
            self._buffer = out.flatten()
        return self._buffer.copy_(out.flatten()).view(out.shape)


@mutant("test_memory broadcast")
class SendersOutputIsItsInput(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        out = super().broadcast(x, src)
        return x.detach() if self.index == src else out


@mutant("test_memory all_reduce")
class LeavesAutogradAttached(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        return out + 0 * x if x.requires_grad else out


# -- at the edges: size, dims, values, memory, what is kept between calls ----------------------------------
@mutant("test_again all_gather")
class KeepsItsResultBufferByShape(ThreadTransport):
    """Of calls with one tensor after the other, and not of those with one tensor again and again."""

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        if x.shape != (4, 4) or x.dtype is not torch.float32 or self.size != self._world.size:
            return out
        if not hasattr(self, "_kept"):
            self._kept: dict[int, Tensor] = {}
        return self._kept.setdefault(dim, out).copy_(out)


@mutant("test_values all_reduce max")
class MaxIsNeverNegative(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        return out.clamp(min=0) if op == "max" and x.dtype.is_signed else out


@mutant("test_large all_reduce")
class ReducesInPlaceWhatIsLarge(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        return x.detach().copy_(out) if x.numel() > 4096 else out


@mutant("test_large all_gather")
class LosesWhatComesAfter64KiB(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        if x.nbytes > 1 << 16:
            out.view(-1)[(1 << 16) // x.element_size() : x.numel()] = 0
        return out


@mutant("test_large all_gather")
class SendsBeforeItReceives(ThreadTransport):
    """As a network without room for 16 MB would leave it: nobody comes to receive."""

    def exchange(self, call: str, x: Tensor) -> list[Tensor]:
        if x.nbytes >= 1 << 24:
            raise BackendError(f"deadlock: all send {x.nbytes} bytes and nobody receives")
        return super().exchange(call, x)


@mutant("test_no_dims all_reduce")
class SumsOfNoDimsHaveOne(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return super().all_reduce(x.reshape(1) if x.ndim == 0 and op == "sum" else x, op, donate)


@mutant("test_no_dims broadcast")
class BroadcastsOfNoDimsHaveOne(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return super().broadcast(torch.atleast_1d(x), src)


@mutant("test_values broadcast")
class BroadcastsByMultiplyingWithZero(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        if not x.is_floating_point():
            return super().broadcast(x, src)
        return summed(self.exchange("sum", x.detach() * float(self.index == src)))


@mutant("test_odd_values all_reduce max")
class MaxLeavesOutNaN(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return summed(self.exchange(op, x)) if op == "sum" else functools.reduce(torch.fmax, self.exchange(op, x))


@mutant("test_started")
class ReadsItsInputWhenItWaits(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        done: list[Tensor] = []

        def wait() -> Tensor:
            if not done:
                done.append(self.all_reduce(x, op, donate))
            return done[0]

        # in the order of the starts, as a queue of the device has it
        if x.numel() < 100_000:
            wait()
        return wait


@mutant("test_started")
class WaitsTwiceForTwoSums(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        out, seen = self.all_reduce(x, op, donate), []

        def wait() -> Tensor:
            seen.append(0)
            return out if len(seen) == 1 else out * 2

        return wait


@mutant("test_values all_gather")
class ForgetsTheSignOfZero(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        return out + 0 if out.is_floating_point() else out


@mutant("test_values all_to_all")
class TradesFiniteNumbersOnly(ThreadTransport):
    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        return super().all_to_all(torch.nan_to_num(x) if x.is_floating_point() else x, split_dim, concat_dim)


@mutant("test_values permute")
class FillsWithZeroTimesWhatItHas(ThreadTransport):
    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        out = super().permute(x, to)
        return out if self.index in to or not x.is_floating_point() else 0 * x.detach()


@mutant("test_odd_memory broadcast")
class ReadsFromTheBeginningOfMemory(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        if x.storage_offset() and x.is_contiguous():
            x = x.detach().as_strided(x.shape, x.stride(), 0)
        return super().broadcast(x, src)


@mutant("test_odd_memory all_gather")
class TakesOneElementForAll(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if 0 in x.stride() and x.numel() > 4:
            x = torch.cat([x[:1], torch.zeros_like(x[1:])])
        return super().all_gather(x, dim)


@mutant("test_modes all_reduce")
class KeepsViewsOfInferenceMode(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        if x.shape != (4, 12):
            return out
        if not hasattr(self, "_view"):
            self._view = torch.empty_like(out)
        return self._view.copy_(out).clone()


@mutant("test_modes permute")
class ReturnsInferenceTensors(ThreadTransport):
    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        with torch.inference_mode():
            return super().permute(x, to)


@mutant("test_precision float32")
class SumsInHalfPrecision(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        wire = x.bfloat16() if x.dtype is torch.float32 and x.numel() == 1024 else x
        return super().all_reduce(wire, op, donate).to(x.dtype)


@mutant("test_values all_reduce")
class SumsWholeNumbersAsFloats(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if x.dtype is not torch.int64:
            return super().all_reduce(x, op, donate)
        return super().all_reduce(x.double(), op, donate).to(torch.int64)


@mutant("test_precision float32")
class SumsInAnotherOrderEachTime(ThreadTransport):
    turn = 0

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        every = self.exchange(op, x)
        if op == "max" or x.numel() != 1024:
            return summed(every) if op == "sum" else torch.stack(every).amax(0)
        self.turn += 1
        return summed(every[self.turn % 2 :] + every[: self.turn % 2])


@mutant("test_precision bfloat16")
class MaxIsRoundedUp(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        return out * 1.01 if op == "max" and x.dtype is torch.bfloat16 and x.numel() == 1024 else out


@mutant("test_again all_reduce")
class KeepsAPlanByShapeWithoutDtype(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        plans = vars(self).setdefault("_plans", {})
        out = super().all_reduce(x, op, donate)
        if x.shape != (4, 4) or x.dtype is torch.bfloat16 or self.size != self._world.size:
            return out
        return out.to(plans.setdefault(x.shape, x.dtype))


@mutant("test_again all_to_all")
class KeepsAPlanBySizeWithoutShape(ThreadTransport):
    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        out = super().all_to_all(x, split_dim, concat_dim)
        if x.numel() != 32 or x.ndim != 2 or self.size != self._world.size:
            return out
        shape = vars(self).setdefault("_plans", {}).setdefault((split_dim, concat_dim), out.shape)
        return out.view(shape)


@mutant("test_interleaved", Plain)
class GroupsShareWhatIsUnderWay(Plain):
    def connect(self, group: Group, rank: int) -> ThreadTransport:
        last: list[Tensor] = vars(self).setdefault("_last", [torch.zeros(0)])

        class Sharing(ThreadTransport):
            def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
                out = last[0] = self.all_reduce(x, op, donate)
                return lambda: last[0] if out.shape == (6,) else out

        return Sharing(group, rank, self._world)


@mutant("test_overlap")
class MixesUpWhatIsUnderWay(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        self._last = self.all_reduce(x, op, donate)
        return lambda: self._last


@mutant("test_same_bits")
class EachRankStartsItsSumWithItself(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        peers, me = self.exchange(op, x), self.index
        peers = peers[me:] + peers[:me]
        return summed(peers) if op == "sum" else torch.stack(peers).amax(0)


@mutant("test_groups all_gather", Plain)
class TakesTheWrongGroups(Plain):
    """Cuts every group out of neighbours, whatever the axis."""

    def connect(self, group: Group, rank: int) -> ThreadTransport:
        ranks = sorted(r for part in group.partition for r in part)
        n = group.size
        parts = tuple(tuple(ranks[i : i + n]) for i in range(0, len(ranks), n))
        return ThreadTransport(Group(group.axes, parts), rank, self._world)


@mutant("test_groups all_gather", Plain)
class OrdersItsMembersBackwards(Plain):
    """Only in groups that are not the first."""

    def connect(self, group: Group, rank: int) -> ThreadTransport:
        parts = (group.partition[0], *(part[::-1] for part in group.partition[1:]))
        return ThreadTransport(Group(group.axes, parts), rank, self._world)


@mutant("test_transpose_law copy")
class NoAllReduceInBackward(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return x.detach().clone() if in_backward() else super().all_reduce(x, op, donate)


@mutant("test_transpose_law all_gather")
class NoReduceScatterInBackward(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return mine(self, x, dim) if in_backward() else super().reduce_scatter(x, dim)


@mutant("test_random_streams", Plain)
class ForgetsItsRandomState(Plain):
    def set_rng_state(self, state: Tensor) -> None:
        pass


@mutant("test_random_streams", Plain)
class SeedsAllAlike(Plain):
    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(1)


@mutant("test_declaration", Plain)
class OfAnotherInterface(Plain):
    interface = 1


class Half(Transport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x


@mutant("test_declaration", Plain)
class HasNoReduceScatter(Plain):
    transport_class = Half  # type: ignore[assignment]


class Tracing(Plain):
    """Differs from Plain in how it traces."""


class Traces(Tracing):
    """Right, and traces as cpu_gloo does."""

    capabilities = replace(Plain.capabilities, tracing=True)

    def trace(self, fn: Any, weights: Any, inputs: Any, dims: Any, folder: Path) -> None:
        ctx = current()
        programs.trace(fn, weights, inputs, dims, [ctx.comm("tp"), ctx.world], ctx.world, folder)

    def load_program(self, folder: Path, weights: Any) -> Any:
        return programs.load(folder, weights, self.comm_for)

    def comm_for(self, axes: str) -> Comm:
        return current().comm(*axes.split("."))


class Quiet(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return x


@mutant("test_traces", Traces)
class DropsACollectiveInAProgram(Traces):
    def comm_for(self, axes: str) -> Comm:
        found = current().comm(*axes.split("."))
        return Comm(Quiet(found.group, self._rank, self._world), self.capabilities.sums())


@mutant("test_traces", Traces)
class BakesTheFirstRankIn(Traces):
    def comm_for(self, axes: str) -> Comm:
        found = copy.copy(super().comm_for(axes))
        found.position = torch.zeros_like(found.position)
        return found


@mutant("test_traces", Traces)
class KeepsTheWeightsOfTheFirstLoad(Traces):
    def load_program(self, folder: Path, weights: Any) -> Any:
        return super().load_program(folder, {name: t.clone() for name, t in weights.items()})


@mutant("test_traces", Traces)
class RunsTheBatchItWasTracedWith(Traces):
    def load_program(self, folder: Path, weights: Any) -> Any:
        program = super().load_program(folder, weights)
        return lambda inputs: program([x[:2] for x in inputs])


@mutant("test_traces", Traces)
class LeavesOneRankItsFirstWeights(Traces):
    def load_program(self, folder: Path, weights: Any) -> Any:
        if self._rank == self._world.size - 1:
            weights = {name: t.clone() for name, t in weights.items()}
        return super().load_program(folder, weights)


@mutant("test_traces", Traces)
class ComputesWithTheWeightsOfRank1(Traces):
    def load_program(self, folder: Path, weights: Any) -> Any:
        world = current().world
        return super().load_program(folder, {name: world.broadcast(t, 1) for name, t in weights.items()})


@mutant("test_traces", Traces)
class ServesRank1sResultForRank0s(Traces):
    """Outputs that all ranks share are right all the same."""

    def load_program(self, folder: Path, weights: Any) -> Any:
        program, world = super().load_program(folder, weights), current().world
        return lambda inputs: [world.broadcast(t, 1) for t in program(inputs)]


@mutant("test_traces", Traces)
class ReturnsItsOutputBufferAgain(Traces):
    def load_program(self, folder: Path, weights: Any) -> Any:
        program = super().load_program(folder, weights)
        kept: dict[Any, Any] = {}

        def call(inputs: Any) -> Any:
            found = program(inputs)
            for old, new in zip(kept.setdefault(inputs[0].shape, found), found, strict=True):
                old.copy_(new)
            return list(kept[inputs[0].shape])

        return call


@mutant("test_traces", Traces)
class AnswersAsItDidToThisShape(Traces):
    """As long as its weights are the same."""

    def load_program(self, folder: Path, weights: Any) -> Any:
        program = super().load_program(folder, weights)
        kept: dict[Any, Any] = {}

        def call(inputs: Any) -> Any:
            key = inputs[0].shape, *(t._version for t in weights.values())
            if key not in kept:
                kept[key] = program(inputs)
            return [t.clone() for t in kept[key]]

        return call


@mutant("test_traces", Traces)
class TracesWhatDiffersByRank(Traces):
    def trace(self, fn: Any, weights: Any, inputs: Any, dims: Any, folder: Path) -> None:
        with suppress(BackendError):
            super().trace(fn, weights, inputs, dims, folder)


@mutant("test_traces", Plain)
class DeclaresTracingAndHasNone(Tracing):
    capabilities = Traces.capabilities


@mutant("test_traces", Plain)
class TracesWithoutDeclaringIt(Tracing):
    def trace(self, fn: Any, weights: Any, inputs: Any, dims: Any, folder: Path) -> None:
        pass


def kit_for(name: str, caught_by: str) -> type[Kit]:
    """With all dtypes where a fault is of one of them, with 16 MB for one."""
    needs = caught_by.startswith("test_values") or name == "SendsBeforeItReceives"
    return Kit if needs else Sampled


@pytest.mark.slow
@pytest.mark.parametrize(("right", "tests"), [(Plain, ALL), (Traces, ("test_traces",))])
def test_the_right_one_passes(right: type[Plain], tests: tuple[str, ...]) -> None:
    assert not any(failures(right, Sampled, tests))  # test_kit_threads.py: in every dtype


QUICK = ("test_values", "test_memory", "test_started", "test_again", "test_groups", "test_transpose_law")


@pytest.mark.parametrize("name", first_of(MUTANTS, *QUICK))
def test_the_kit_names_the_fault(name: str) -> None:
    caught_by, cls = MUTANTS[name]
    assert found(caught_by, cls, kit_for(name, caught_by))


class DividesNothing(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        raise BackendError("a reduce_scatter is made")

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        raise BackendError("an all_to_all is made")


class OnThree(Sampled):
    worlds = (3,)


DIVIDING = [name for name in ALL if {"line", "primitive"} <= signature(getattr(Contract, name)).parameters.keys()]


@pytest.mark.parametrize("test", [name for name in DIVIDING if name != "test_no_dims"])
def test_three_ranks_make_every_call(test: str) -> None:
    """Shapes follow from the number of ranks: with fixed ones there would be nothing that three divide."""
    backend = type("DividesNothing", (Plain,), {"transport_class": DividesNothing})
    for primitive in ("reduce_scatter", "all_to_all", "start_reduce_scatter"):
        assert found(f"{test} {primitive}", backend, OnThree)


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 80
    assert len(RARE) >= 30
    caught = {by.partition(" ")[0] for registry in (MUTANTS, RARE, LIMITS) for by, _ in registry.values()}
    assert caught >= {n for n in vars(Contract) if n.startswith("test_")} - {
        "test_there_are_ranks",
        "test_lost_ranks",  # test_kit_lost.py
        "test_float32",  # a setting of the process, no transport: test_kit_threads.py
        "test_mixed",
        "test_layers",
        "test_training",
        "test_pipeline",
        "test_checkpoint",
    }


# the sum of two is the same in either order, and so many calls are for a kit that is told to make them
HIDDEN = {"EachRankStartsASumAbove256KiBWithItself", "CountsCallsIn16Bits"}
EVERY = {name: fault for name, fault in (LIMITS | MUTANTS | RARE).items() if name not in HIDDEN}
FIRST = {by.split()[0]: name for name, (by, _) in reversed(EVERY.items())}
SHOWN_BY_VERIFY = Registry(
    (name, (by, cls))
    for name, (by, cls) in EVERY.items()
    if by.split()[0] in EDGES and (name in LIMITS or FIRST[by.split()[0]] == name)
)


@pytest.mark.parametrize("name", first_of(SHOWN_BY_VERIFY, "test_sizes", "test_same_bits"))
def test_a_users_machine_shows_the_fault(name: str) -> None:
    caught_by, cls = SHOWN_BY_VERIFY[name]

    def shows(ctx: ParallelContext) -> bool:
        try:
            return any(row.wrong for row in edge_rows(ctx, [caught_by.split()[0]]))
        except RuntimeError:  # in place of a wrong number: a result whose memory cannot be written, say
            return True

    assert any(run_ranks(Mesh({"tp": 2}), shows, backend=cls))


@pytest.mark.slow
def test_verify_finds_nothing_wrong_at_the_edges_of_what_is_right() -> None:
    found = run_ranks(Mesh({"tp": 2}), lambda ctx: [row.wrong for row in edge_rows(ctx)], backend=Plain)
    assert found == [[[]] * len(EDGES)] * 2
