"""The kit fails a backend that is wrong for some dtypes, sizes, values, strides or groups alone."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from faults import Plain, Registry, Sampled, failures, first_of, found, summed
from torch import Tensor

from tpcore.comm.transport import Op, Pending, Transport
from tpcore.layout.mesh import Group
from tpcore.testing.threads import ThreadTransport

RARE = Registry()
mutant = RARE.mutant
HALVES = (torch.float16, torch.bfloat16)
LARGE = 4096


class Full(Plain):
    """With the dtypes that these need beside those of Plain."""

    capabilities = replace(
        Plain.capabilities,
        dtypes=(*Plain.capabilities.dtypes, torch.float64, torch.float16),
        moved=(torch.float8_e4m3fn, torch.complex64),
    )


# -- dtypes and values -------------------------------------------------------------------------------------
@mutant("test_values all_gather")
class MovesWholeNumbersAsFloats(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if x.dtype is not torch.int64:
            return super().all_gather(x, dim)
        return super().all_gather(x.double(), dim).long()


@mutant("test_values broadcast", Full)
class BroadcastsDoublesAsFloats(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return super().broadcast(x.float() if x.dtype is torch.float64 else x, src).to(x.dtype)


@mutant("test_values all_gather")
class MovesBfloat16AsFloat16(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return super().all_gather(x.half() if x.dtype is torch.bfloat16 else x, dim).to(x.dtype)


@mutant("test_values all_gather")
class FlushesDenormals(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        if x.dtype is torch.float32:
            out[out.abs() < torch.finfo(torch.float32).tiny] = 0
        return out


@mutant("test_values permute")
class QuietsNaN(ThreadTransport):
    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        out = super().permute(x, to)
        return torch.where(out.isnan(), torch.nan, out) if x.dtype is torch.float32 else out


@mutant("test_values all_reduce max")
class MaximumOfWholeNumbersAsFloats(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if op == "sum" or x.dtype is not torch.int64:
            return super().all_reduce(x, op, donate)
        return super().all_reduce(x.float(), op, donate).long()


@mutant("test_odd_values all_reduce", Full)
class HalfSumsSaturate(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        if x.dtype not in HALVES or op == "max":
            return out
        top = torch.finfo(x.dtype).max
        return out.clamp(-top, top)


@mutant("test_values broadcast", Full)
class BroadcastsHalvesByMultiplyingWithZero(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        if x.dtype is not torch.float16 or not x.isnan().any():
            return super().broadcast(x, src)
        return summed(self.exchange("sum", x.detach() * float(self.index == src)))


@mutant("test_odd_values all_reduce max")
class MaximumOfHalvesLeavesOutNaN(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if op == "sum" or x.dtype is not torch.bfloat16:
            return super().all_reduce(x, op, donate)
        return functools.reduce(torch.fmax, self.exchange(op, x))


@mutant("test_large reduce_scatter")
class ScattersSumsInHalfPrecision(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        fine = x.dtype is not torch.float32 or x.numel() < 1024
        return super().reduce_scatter(x if fine else x.bfloat16(), dim).to(x.dtype)


@mutant("test_empty all_gather")
class NothingIsFloat(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        return out if out.numel() else out.float()


# -- shapes and arguments ----------------------------------------------------------------------------------
@mutant("test_values all_gather")
class KnowsFourDims(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return super().all_gather(x, min(dim, 3))


@mutant("test_values all_to_all")
class TradesInReverseIfItConcatenatesBeforeWhereItSplits(ThreadTransport):
    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        out = super().all_to_all(x, split_dim, concat_dim)
        if concat_dim != split_dim - 1:
            return out
        return torch.cat(out.chunk(self.size, concat_dim)[::-1], concat_dim)


@mutant("test_values permute")
class WhoSendsInALineReceivesNothing(ThreadTransport):
    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        out = super().permute(x, to)
        both = self.index in to and to[self.index] >= 0
        return torch.zeros_like(out) if both and -1 in to else out


# -- sizes -------------------------------------------------------------------------------------------------
@mutant("test_large all_gather")
class GathersLargeMatricesAlongTheFirstDim(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        return super().all_gather(x, 0).view(out.shape) if x.numel() > LARGE else out


@mutant("test_large all_gather")
class ReadsLargeMemoryAndNotStrides(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if x.numel() > LARGE and not x.is_contiguous():
            x = x.detach().as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
        return super().all_gather(x, dim)


@mutant("test_large all_gather", Full)
class CountsEightBytesAsFour(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        if x.itemsize == 8 and x.nbytes > 1 << 16:
            out.view(-1)[x.numel() // 2 : x.numel()] = 0
        return out


@mutant("test_large all_gather")
class LosesTheLastOfExactly64KiB(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        if x.nbytes == 1 << 16:
            out.view(-1)[x.numel() - 1] = 0
        return out


@mutant("test_large all_reduce")
class CompressesLargeSums(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if op == "max" or x.dtype is not torch.float32 or x.numel() <= LARGE:
            return super().all_reduce(x, op, donate)
        return super().all_reduce(x.bfloat16(), op, donate).float()


@mutant("test_large all_to_all")
class TradesLargeColumnsInReverse(ThreadTransport):
    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        out = super().all_to_all(x, split_dim, concat_dim)
        if x.numel() <= LARGE or split_dim == 0:
            return out
        return torch.cat(out.chunk(self.size, concat_dim)[::-1], concat_dim)


@mutant("test_same_bits")
class EachRankStartsALargeSumWithItself(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if op == "max" or x.numel() <= LARGE:
            return super().all_reduce(x, op, donate)
        peers, me = self.exchange(op, x), self.index
        return summed(peers[me:] + peers[:me])


# -- memory ------------------------------------------------------------------------------------------------
@mutant("test_memory all_reduce")
class KeepsDenseStrides(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        return torch.empty_like(x.detach()).copy_(super().all_reduce(x, op, donate))


@mutant("test_memory all_reduce max")
class ReturnsItsInputIfThatIsTheMaximum(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        return x.detach() if op == "max" and torch.equal(out, x) else out


@mutant("test_donated")
class WritesToTheEndOfTheStorage(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        if donate and x.storage_offset():
            x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).zero_()
        return out


@mutant("test_again all_gather")
class KeepsStridesByAddress(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        seen = vars(self).setdefault("_seen", {})
        if x.numel() == 16 and x.ndim == 2:
            x = x.detach().as_strided(x.shape, seen.setdefault((x.data_ptr(), x.dtype), x.stride()))
        return super().all_gather(x, dim)


@mutant("test_freed")
class KeepsAllItHasSent(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        vars(self).setdefault("_sent", []).append(x.detach().clone())
        return super().all_gather(x, dim)


# -- time --------------------------------------------------------------------------------------------------
@mutant("test_overlap")
class SendsWhenItWaits(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        taken: Tensor = x.detach().clone()
        done: list[Tensor] = []

        def wait() -> Tensor:
            if not done:
                done.append(self.all_reduce(taken, op, False))
            return done[0]

        return wait


@mutant("test_started", Full)
class ReadsHalvesWhenItWaits(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        if x.dtype not in HALVES or x.numel() < 100_000:
            return super().start_all_reduce(x, op, donate)
        done: list[Tensor] = []

        def wait() -> Tensor:
            if not done:
                done.append(self.all_reduce(x, op, donate))
            return done[0]

        return wait


@mutant("test_many")
class CountsCallsInAByte(ThreadTransport):
    small = 0

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        if x.numel() > 1:
            return out
        self.small += 1
        kept, self._kept = getattr(self, "_kept", out), out
        return kept.clone() if self.small % 256 == 0 else out


# -- groups and random streams -----------------------------------------------------------------------------
@mutant("test_groups all_gather", Plain)
class SortsItsMembers(Plain):
    def connect(self, group: Group, rank: int) -> ThreadTransport:
        parts = tuple(tuple(sorted(part)) for part in group.partition)
        return ThreadTransport(replace(group, partition=parts), rank, self._world)


@mutant("test_groups all_gather", Plain)
class TakesAPartForTheWholeAxis(Plain):
    def connect(self, group: Group, rank: int) -> ThreadTransport:
        if group.within is not None:
            group = Group(group.axes, (tuple(r for part in group.partition for r in part),))
        return ThreadTransport(group, rank, self._world)


@mutant("test_random_streams", Plain)
class TakesAByteOfTheSeed(Plain):
    def manual_seed(self, seed: int) -> None:
        super().manual_seed(seed & 0xFF)


@mutant("test_random_streams", Plain)
class ItsRandomStateIsLive(Plain):
    def get_rng_state(self) -> Tensor:
        live: Tensor = vars(self).setdefault("_live", super().get_rng_state())
        return live.copy_(super().get_rng_state())


class OfAll(Sampled):
    """Every dtype."""

    def choices(self) -> dict[str, list[Any]]:
        return super().choices() | {"dtype": list(self.tested.capabilities.dtypes)}


@pytest.mark.parametrize("name", first_of(RARE, "test_donated", "test_random_streams"))
def test_the_kit_names_the_fault(name: str) -> None:
    caught_by, cls = RARE[name]
    assert found(caught_by, cls, OfAll)


class Least(ThreadTransport):
    """The three methods that a transport must write; the others are their defaults."""

    broadcast = Transport.broadcast
    all_to_all = Transport.all_to_all
    permute = Transport.permute


@pytest.mark.slow
def test_the_defaults_pass() -> None:
    assert not any(failures(type("Defaults", (Plain,), {"transport_class": Least}), Sampled))
