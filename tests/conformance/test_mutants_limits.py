"""The kit fails a backend that is right up to a limit: of size, of the number of calls, of the range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from faults import Plain, Registry, first_of, found, summed
from test_mutants_rare import OfAll
from torch import Tensor

from tpcore.comm.transport import Op, Pending
from tpcore.testing.threads import ThreadTransport

LIMITS = Registry()
mutant = LIMITS.mutant


class Full(Plain):
    """With all dtypes that these need."""

    capabilities = replace(Plain.capabilities, dtypes=(*Plain.capabilities.dtypes, torch.float16, torch.int32))


# -- sizes -------------------------------------------------------------------------------------------------
@mutant("test_same_bits")
class EachRankStartsASumAbove256KiBWithItself(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if op == "max" or x.numel() <= 1 << 16:
            return super().all_reduce(x, op, donate)
        peers, me = self.exchange(op, x), self.index
        return summed(peers[me:] + peers[:me])


@mutant("test_same_bits")
class MaximumOfTwoZerosIsItsOwn(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        return torch.where((out == 0) & (x == 0), x.detach(), out) if op == "max" else out


@mutant("test_sizes all_gather")
class ReturnsOneOfTwoBuffersAbove1MB(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = super().all_gather(x, dim)
        if out.nbytes <= 1_000_000:
            return out
        turn = vars(self)["turn"] = 1 - vars(self).get("turn", 0)
        kept: Tensor = vars(self).setdefault("kept", {}).setdefault((turn, out.shape, out.dtype), out)
        return kept.copy_(out)


@mutant("test_sizes broadcast")
class SendersOutputIsItsInputAbove64KiB(ThreadTransport):
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        out = super().broadcast(x, src)
        return x.detach() if self.index == src and x.nbytes > 1 << 16 and x.is_contiguous() else out


@mutant("test_sizes permute")
class SendsWhatTheTensorHeldBefore(ThreadTransport):
    """As a plan does that has packed the tensor object before."""

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        packed = vars(self).setdefault("packed", {})
        if packed.get("tensor") is not x or packed["to"] != to:
            packed.update(tensor=x, to=to, data=x.detach().clone())
        return super().permute(packed["data"], to)


# -- numbers -----------------------------------------------------------------------------------------------
@mutant("test_odd_values all_reduce", Full)
class DividesHalvesBeforeItSums(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if x.dtype is not torch.float16 or op == "max" or not (x.abs() < 16_000).all():
            return super().all_reduce(x, op, donate)
        return super().all_reduce(x / self.size, op, donate) * self.size


@mutant("test_odd_values reduce_scatter", Full)
class SumsOfDenormalsAreZero(ThreadTransport):
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        out = super().reduce_scatter(x, dim)
        if not x.is_floating_point():
            return out
        return torch.where(out.abs() < torch.finfo(x.dtype).tiny, 0 * out, out)


@mutant("test_precision bfloat16", Full)
class CutsSumsOffInsteadOfRounding(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if x.dtype is not torch.bfloat16 or op == "max":
            return super().all_reduce(x, op, donate)
        total = summed([t.float() for t in self.exchange(op, x)])
        return (total.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


@mutant("test_no_dims all_reduce", Full)
class WholeNumbersWithoutDimsAreLong(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out = super().all_reduce(x, op, donate)
        return out.long() if x.ndim == 0 and x.dtype is torch.int32 else out


# -- the number of calls -----------------------------------------------------------------------------------
def _late(name: str, nth: int) -> Callable[..., Tensor]:
    """Method ``name``, whose ``nth`` call returns the result of the call before."""

    def method(self: Any, x: Tensor, *arguments: Any) -> Tensor:
        out: Tensor = getattr(super(type(self), self), name)(x, *arguments)
        kept = vars(self)
        kept["calls"] = kept.get("calls", 0) + 1
        before, kept["before"] = kept.get("before", out), out.clone()
        stale = kept["calls"] % nth == 0 and before.shape == out.shape and before.dtype == out.dtype
        return before if stale else out

    return method


for _name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "permute"):
    _made = type(f"RepeatsTheThousandth_{_name}", (ThreadTransport,), {_name: _late(_name, 1000)})
    mutant(f"test_many {_name}")(_made)


@mutant("test_many start_all_reduce")
class RepeatsTheThousandthStart(ThreadTransport):
    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        out = self.all_reduce(x, op, donate)
        kept = vars(self)
        kept["calls"] = kept.get("calls", 0) + 1
        before, kept["before"] = kept.get("before", out), out
        return lambda: before.clone() if kept["calls"] % 1000 == 0 and before.shape == out.shape else out


@mutant("test_many all_reduce")
class CountsCallsIn16Bits(ThreadTransport):
    all_reduce = _late("all_reduce", 1 << 16)  # type: ignore[assignment]


@mutant("test_many all_gather")
class SmallResultsComeFrom64Buffers(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out, kept = super().all_gather(x, dim), vars(self)
        turn = kept["turn"] = kept.get("turn", 0) + 1
        if out.numel() > 64:
            return out
        ring = kept.setdefault("ring", {}).setdefault((out.shape, out.dtype, out.is_inference()), {})
        buffer: Tensor = ring.setdefault(turn % 64, torch.empty_like(out))
        return buffer.copy_(out)


# -- memory ------------------------------------------------------------------------------------------------
@mutant("test_freed")
class LeaksAKilobyteACall(ThreadTransport):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        vars(self).setdefault("leak", []).append(torch.empty(1024, dtype=torch.uint8))
        return super().all_gather(x, dim)


@mutant("test_freed")
class KeepsEvery20thResult(ThreadTransport):
    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        out, kept = super().all_reduce(x, op, donate), vars(self)
        kept["calls"] = kept.get("calls", 0) + 1
        if kept["calls"] % 20 == 0:
            kept.setdefault("results", []).append(out)
        return out


class Long(OfAll):
    calls = 70_000


@pytest.mark.parametrize("name", first_of(LIMITS, "test_sizes", "test_same_bits", "test_odd_values", "test_many"))
def test_the_kit_names_the_fault(name: str) -> None:
    caught_by, cls = LIMITS[name]
    assert found(caught_by, cls, Long if name == "CountsCallsIn16Bits" else OfAll)
