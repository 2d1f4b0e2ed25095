"""Comparisons of results: elementwise error bounds, bit equality, equality over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...comm.comm import Comm
from ...comm.parts import plain
from ...runtime.context import ParallelContext


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


Place = Callable[[Tensor], Tensor]
"""This rank's part of a full tensor."""


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


class Findings:
    """Collects errors instead of raising, so that ranks stay in step and report all of them. Values are read
    together at the end, so that a lazy backend runs one program for the whole case."""

    def __init__(self, ctx: ParallelContext, label: str, dtype: torch.dtype) -> None:
        self.where = f"{label} on rank {ctx.rank} of tp={ctx.comm('tp').size}"
        self.dtype = dtype
        self.messages: list[str] = []
        self.worst = (0.0, 0.0)  # the largest error relative to its bound, and that bound
        self._mark_step = ctx.backend.mark_step
        self._later: list[tuple[Tensor, Callable[[Tensor], str | None]]] = []

    def settle(self) -> None:
        self._mark_step()
        for value, judge in self._later:
            message = judge(value.cpu())
            if message is not None:
                self.messages.append(f"{self.where}: {message}")
        self._later.clear()

    def bound(self, magnitude: Tensor, terms: int, roundings: int, wide: torch.dtype | None = None) -> Tensor:
        u = unit(wide or self.dtype)
        return magnitude * (roundings * u + 2 * terms * unit(accumulator(self.dtype)))

    def close(
        self, what: str, got: Tensor | None, want: Tensor, bound: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        if got is None:
            self.messages.append(f"{self.where}: {what} is None")
        elif got.shape != want.shape:
            self.messages.append(f"{self.where}: {what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
        elif got.dtype != (dtype or self.dtype):
            self.messages.append(f"{self.where}: {what} is {got.dtype}, not {dtype or self.dtype}")
        else:
            self._later.append((_now(got), partial(self._judge, what, _now(want), _now(bound))))

    def _judge(self, what: str, want: Tensor, bound: Tensor, got: Tensor) -> str | None:
        error, bound = (got.double() - want).abs(), bound.expand_as(want)
        if error.numel():
            at = int((error / bound.clamp_min(1e-300)).nan_to_num(float("inf")).argmax())
            pair = float(error.flatten()[at]), float(bound.flatten()[at])
            self.worst = max(self.worst, pair, key=lambda p: p[0] / max(p[1], 1e-300))
        return _far(what, want, bound, got)

    def part(
        self,
        what: str,
        got: Tensor | None,
        full: tuple[Tensor, Tensor],
        roundings: tuple[int, int],
        place: Place,
        comm: Comm,
    ) -> None:
        """Compare with this rank's part of ``full``, an exact tensor and its magnitude; where that is all of it, expect
        the same bits on every rank. ``roundings``: terms of a sum, and roundings to the dtype, as of ``bound``."""
        exact, magnitude = full
        want = place(exact)
        self.close(what, got, want, place(self.bound(magnitude, *roundings)))
        if want.shape == exact.shape:
            self.replicated(what, got, comm)

    def same(self, what: str, got: Tensor | None, want: Tensor | None) -> None:
        """Expect equal bits, dtype and shape."""
        kinds = [None if t is None else (t.dtype, tuple(t.shape)) for t in (got, want)]
        if got is None or want is None or kinds[0] != kinds[1]:
            self.messages.append(f"{self.where}: {what} is {kinds[0]}, not {kinds[1]}")
        else:
            both = torch.stack([_now(got), _now(want).to(got.device)])
            self._later.append((both, partial(_unequal, what)))

    def replicated(self, what: str, x: Tensor | None, comm: Comm) -> None:
        """Expect the same bits on every rank."""
        if x is None:
            self.messages.append(f"{self.where}: {what} is None")
            return
        everyone = comm.all_gather(x.detach().unsqueeze(0), 0)
        self._later.append((torch.cat([everyone, x.detach().unsqueeze(0)]), partial(_differs, what)))

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.messages.append(f"{self.where}: {what}")


def _now(x: Tensor) -> Tensor:
    """A copy, because the tensor may be changed in place before it is compared."""
    return plain(x.detach()).clone()


def _far(what: str, want: Tensor, bound: Tensor, got: Tensor) -> str | None:
    error = (got.double() - want).abs()
    if bool((error <= bound).all()):  # not (error > bound).any(): nan is wrong as well
        return None
    at = int((error - bound).nan_to_num(float("inf")).argmax())
    have, right, allowed = (float(v.flatten()[at]) for v in (got, want, bound))
    return f"{what} at {at}: got {have}, want {right}, allowed error {allowed:.2e}"


def _unequal(what: str, both: Tensor) -> str | None:
    got, want = both
    if torch.equal(got, want):
        return None
    far = (got.double() - want.double()).abs().max()
    return f"{what} is not bit-equal, the largest difference is {far:.2e}"


def _differs(what: str, everyone: Tensor) -> str | None:
    alike = all(torch.equal(one, everyone[-1]) for one in everyone)
    return None if alike else f"{what} differs between ranks"
