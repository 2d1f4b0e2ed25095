"""A case of the matrix, its comparison on one rank, and a row of the matrix: all cases of a layer, generated."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.observer import plain as materialized
from ...layout.shard import ShardSpec
from ...runtime.context import ParallelContext
from ..kit.rank import RankCheck, Wrong

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
GARBAGE = 7.0  # the value in padding, which must not count
Place = Callable[[Tensor], Tensor]
"""This rank's part of a full tensor."""


@dataclass(frozen=True)
class Case:
    """One case of the matrix. ``options``: in the order of the row's axes."""

    layer: str
    dtype: str
    options: tuple[tuple[str, Any], ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python 3.10 looks up __setstate__ before the instance has its options
            raise AttributeError(name)
        if name not in dict(self.options):
            raise AttributeError(f"{self} has no option {name!r}")
        return self.get(name)

    def get(self, name: str) -> Any:
        """The option, or None where the row has no such axis."""
        return dict(self.options).get(name)

    def __str__(self) -> str:
        return f"{self.layer} {self.dtype} " + " ".join(f"{k}={v}" for k, v in self.options)


@dataclass(frozen=True)
class MatrixRow:
    """The cases of one layer: the product of ``axes``, of which it takes what it ``accepts``; ``check`` compares
    one."""

    name: str
    layer: object
    """The layer's class, or a function such as the loss. Every new layer of tpcore needs a row."""
    axes: Mapping[str, tuple[Any, ...]]
    check: Callable[[Cell], None]
    accepts: Callable[[dict[str, Any]], bool] = lambda options: True

    def cases(self, dtype: str) -> list[Case]:
        """Every combination of the axes; the number of dims and the memory layout alternate over them."""
        combinations = [dict(zip(self.axes, v, strict=True)) for v in itertools.product(*self.axes.values())]
        shapes = itertools.cycle(itertools.product((3, 2, 4, 3, 4), (False, True)))
        out = []
        for o, (ndim, scrambled) in zip(filter(self.accepts, combinations), shapes, strict=False):
            o |= {"ndim": max(ndim, 3) if o.get("seq") == 1 else ndim, "scrambled": scrambled}
            out.append(Case(self.name, dtype, tuple(o.items())))
        return out


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def grad_of(x: Tensor) -> Tensor:
    if x.grad is None:
        raise RuntimeError("the plain module has given no gradient")
    return x.grad


class Reference:
    """What a plain module computes in float64: ``outs``, and the gradients of ``x`` and of its parameters. ``of`` is
    applied to every tensor first: with ``torch.abs`` the results are magnitudes for the bounds."""

    def __init__(
        self,
        plain: nn.Module,
        run: Callable[[nn.Module, Tensor], Sequence[Tensor]],
        x: Tensor,
        grads: Sequence[Tensor],
        of: Callable[[Tensor], Tensor],
    ) -> None:
        self.module = copy.deepcopy(plain).double()
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(of(p))
        self.x = of(x.double()).requires_grad_()
        outs = run(self.module, self.x)
        torch.autograd.backward(outs, [of(g.double()) for g in grads])
        self.outs = [out.detach() for out in outs]


class Cell(RankCheck):
    """One case on this rank: its parts of full tensors, and their comparisons. Values are read together at the end, so
    that a lazy backend runs one program for the whole case."""

    def __init__(self, ctx: ParallelContext, case: Case, wrong: Wrong) -> None:
        super().__init__(ctx, wrong=wrong)
        self.case, self.dtype = case, DTYPES[case.dtype]
        self.lead = (self.k, self.k, 2)[: case.ndim - 1]
        """The dims before the features, of which the ranks divide each sequence dim."""
        self.seq: int | None = case.get("seq")
        self.sequence: dict[str, Any] = {} if self.seq is None else {"sequence_dim": self.seq}
        self._later: list[tuple[Tensor, Callable[[Tensor], str | None]]] = []

    # -- tensors --------------------------------------------------------------------------------------------
    def tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens; all of them without sequence parallelism."""
        return x if self.seq is None else x.chunk(self.size, self.seq)[self.me]

    def features(self, x: Tensor, spec: ShardSpec, padding: float = 0.0) -> Tensor:
        """This rank's part of the last dim, cut by ``spec``, which is for that dim alone."""
        whole = ShardSpec(tuple(x.shape), x.ndim - 1, spec.blocks)
        return whole.shard(x, self.me, self.size).masked_fill(spec.source_index(self.size)[self.me] < 0, padding)

    def shard_of(self, module: Any, name: str, full: Tensor) -> Tensor:
        shard: Tensor = module.shard_specs[name].shard(full, self.me, self.size)
        return shard

    def placed(self, x: Tensor) -> Tensor:
        """On the device, in half of the cases in a memory order that no ``view`` can flatten."""
        x = x.detach().to(self.ctx.device)
        return x.transpose(0, -1).contiguous().transpose(0, -1) if self.case.scrambled else x

    def leaf(self, x: Tensor) -> Tensor:
        return self.placed(x).requires_grad_()

    # -- comparisons ----------------------------------------------------------------------------------------
    def expect(self, holds: bool, message: str) -> None:
        if not holds:
            self.wrong.append(f"{self.case} on rank {self.ctx.rank} of tp={self.size}: {message}")

    def settle(self) -> None:
        self.ctx.backend.mark_step()
        for value, judge in self._later:
            message = judge(value.cpu())
            self.expect(message is None, message or "")
        self._later.clear()

    def bound(self, magnitude: Tensor, terms: int, roundings: int) -> Tensor:
        return magnitude * (roundings * unit(self.dtype) + 2 * terms * unit(accumulator(self.dtype)))

    def close(
        self, what: str, got: Tensor | None, want: Tensor, bound: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        if got is not None and (got.shape, got.dtype) == (want.shape, dtype or self.dtype):
            self._later.append((_now(got), partial(self._judge, what, _now(want), _now(bound))))
            return
        kind = got if got is None else f"{got.dtype} {tuple(got.shape)}"
        self.expect(False, f"{what} is {kind}, not {dtype or self.dtype} {tuple(want.shape)}")

    def _judge(self, what: str, want: Tensor, bound: Tensor, got: Tensor) -> str | None:
        error, bound = (got.double() - want).abs(), bound.expand_as(want)
        if not error.numel():
            return None
        # where the bound is 0, any error is the largest; so is nan
        at = int((error / bound.clamp_min(1e-300)).nan_to_num(float("inf")).argmax())
        have, right, far, allowed = (float(v.flatten()[at]) for v in (got, want, error, bound))
        self.wrong.reached(far, allowed)
        if bool((error <= bound).all()):  # not (error > bound).any(): nan is wrong as well
            return None
        return f"{what} at {at}: got {have}, want {right}, allowed error {allowed:.2e}"

    def part(
        self, what: str, got: Tensor | None, full: tuple[Tensor, Tensor], roundings: tuple[int, int], place: Place
    ) -> None:
        """Compare with this rank's part of ``full``, an exact tensor and its magnitude; where that is all of it, expect
        the same bits on every rank. ``roundings``: terms of a sum, and roundings to the dtype, as of ``bound``."""
        exact, magnitude = full
        want = place(exact)
        self.close(what, got, want, place(self.bound(magnitude, *roundings)))
        if want.shape == exact.shape:
            self.replicated(what, got)

    def same(self, what: str, got: Tensor | None, want: Tensor | None) -> None:
        """Expect equal bits, dtype and shape."""
        kinds = [None if t is None else (t.dtype, tuple(t.shape)) for t in (got, want)]
        if got is None or want is None or kinds[0] != kinds[1]:
            self.expect(False, f"{what} is {kinds[0]}, not {kinds[1]}")
        else:
            both = torch.stack([_now(got), _now(want).to(got.device)])
            self._later.append((both, partial(_unequal, f"{what} is not bit-equal")))

    def replicated(self, what: str, x: Tensor | None) -> None:
        """Expect the same bits on every rank."""
        self.expect(x is not None, f"{what} is None")
        if x is not None:
            mine = x.detach().unsqueeze(0)
            everyone = torch.cat([mine, self.comm.all_gather(mine, 0)])
            self._later.append((everyone, partial(_unequal, f"{what} differs between ranks")))

    def gradients(
        self,
        layer: Any,
        exact: nn.Module,
        sizes: nn.Module,
        terms: int,
        roundings: Callable[[str], int],
        label: str = "",
    ) -> None:
        """Of the parameters of ``layer``."""
        for name, p in exact.named_parameters():
            bound = self.bound(grad_of(sizes.get_parameter(name)), terms, roundings(name))
            want, allowed = (self.shard_of(layer, name, t) for t in (grad_of(p), bound))
            self.close(f"{label}{name} grad", layer.get_parameter(name).grad, want, allowed)

    def initial(self, layer: Any, plain: nn.Module) -> None:
        """The initial values of ``layer`` are this rank's parts of those of ``plain``."""
        for name, p in plain.named_parameters():
            self.same(f"initial {name}", getattr(layer, name).detach(), self.shard_of(layer, name, p.detach()))
        keys, plain_keys = list(layer.state_dict()), list(plain.state_dict())
        self.expect(keys == plain_keys, f"state_dict has {keys}, the plain module {plain_keys}")


def _now(x: Tensor) -> Tensor:
    """A copy, because the tensor may be changed in place before it is compared."""
    return materialized(x.detach()).clone()


def _unequal(what: str, several: Tensor) -> str | None:
    if all(torch.equal(one, several[0]) for one in several):
        return None
    far = (several.double() - several[0].double()).abs().max()
    return f"{what}, the largest difference is {far:.2e}"
