"""How a result is compared: elementwise error bounds, bit equality, equality over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from tpcore.comm import Comm
from tpcore.context import ParallelContext

from .cases import Case


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Findings:
    """Collects what is wrong instead of raising, so that ranks stay in step and all of it is seen."""

    def __init__(self, ctx: ParallelContext, case: Case) -> None:
        self.where = f"{case} on rank {ctx.rank} of tp={ctx.comm('tp').size}"
        self.dtype = case.torch_dtype
        self.messages: list[str] = []

    def bound(self, magnitude: Tensor, terms: int, roundings: int, wide: torch.dtype | None = None) -> Tensor:
        u = unit(wide or self.dtype)
        return magnitude * (roundings * u + 2 * terms * unit(accumulator(self.dtype)))

    def close(
        self, what: str, got: Tensor | None, want: Tensor, bound: Tensor, dtype: torch.dtype | None = None
    ) -> None:
        if got is None:
            self.messages.append(f"{self.where}: {what} is None")
        elif got.shape != want.shape:
            self.messages.append(
                f"{self.where}: {what} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
            )
        elif got.dtype != (dtype or self.dtype):
            self.messages.append(f"{self.where}: {what} is {got.dtype}, not {dtype or self.dtype}")
        else:
            error = (got.detach().cpu().double() - want).abs()
            if not bool((error <= bound).all()):  # not (error > bound).any(): nan is wrong as well
                at = int((error - bound).nan_to_num(float("inf")).argmax())
                have, right, allowed = (float(v.flatten()[at]) for v in (got.detach(), want, bound))
                self.messages.append(
                    f"{self.where}: {what} at {at}: got {have}, want {right}, allowed error {allowed:.2e}"
                )

    def same(self, what: str, got: Tensor | None, want: Tensor | None) -> None:
        """Bit for bit, and of the same dtype and shape."""
        kinds = [None if t is None else (t.dtype, tuple(t.shape)) for t in (got, want)]
        if got is None or want is None or kinds[0] != kinds[1]:
            self.messages.append(f"{self.where}: {what} is {kinds[0]}, not {kinds[1]}")
        elif not torch.equal(got.detach().cpu(), want):
            far = (got.detach().cpu().double() - want.double()).abs().max()
            self.messages.append(
                f"{self.where}: {what} is not bit-equal, the largest difference is {far:.2e}"
            )

    def replicated(self, what: str, x: Tensor | None, comm: Comm) -> None:
        """The same bits on every rank."""
        if x is None:
            self.messages.append(f"{self.where}: {what} is None")
            return
        everyone = comm.all_gather(x.detach().unsqueeze(0), 0)
        if not all(torch.equal(one, x) for one in everyone):
            self.messages.append(f"{self.where}: {what} differs between ranks")

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.messages.append(f"{self.where}: {what}")
