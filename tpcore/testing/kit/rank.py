"""What one rank finds in a check of the conformance kit: how results are judged, and what they stay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import update_wrapper
from hashlib import blake2b
from typing import Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor

from ...comm.comm import Comm
from ...runtime.context import ParallelContext
from .samples import multiple

P = ParamSpec("P")
_TOLD = 8


class Wrong(list[str]):
    """Messages about errors, and the largest ``error`` relative to the ``allowed`` one."""

    error = allowed = 0.0

    def measure(self, what: str, got: Tensor, want: Tensor, allowed: float = 0.0) -> None:
        """Compare by the largest difference; with ``allowed`` 0 the values must be equal."""
        got, want = (t.detach().cpu().double() for t in (got, want))
        alike = got.shape == want.shape
        error = float((got - want).abs().max()) if alike and got.numel() else (0.0 if alike else float("inf"))
        if not error <= allowed:  # nan too
            self.append(f"{what} is off by {error:.2e}, allowed {allowed:.0e}")
        self.reached(error, allowed)

    def reached(self, error: float, allowed: float) -> None:
        if not error / max(allowed, 1e-300) < self.error / max(self.allowed, 1e-300):
            self.error, self.allowed = error, allowed


class Right(NamedTuple):
    """What the result of a call has to be, up to what is ``allowed``. Of a ``reduced`` one a NaN may have any bits, a
    zero any sign; ``summed``: the name under which all ranks have to have the same bits."""

    want: Tensor
    reduced: bool = False
    allowed: Tensor | None = None
    summed: str = ""

    def problem(self, got: Tensor) -> str:
        problem, want = differs(got, self.want), self.want
        if problem and self.reduced and (got.dtype, got.shape) == (want.dtype, want.shape):
            got = got.detach().cpu()
            right = (got == want) | (got.isnan() & want.isnan())
            if self.allowed is not None:
                right |= (got.double() - want.double()).abs() <= self.allowed
            return differs(torch.where(right, want, got), want)
        return problem


class RankCheck:
    """A check on this rank: its group, over tp unless another is given, and what it has found ``wrong``."""

    remedy = ""  # the end of each message

    def __init__(self, ctx: ParallelContext, comm: Comm | None = None, wrong: Wrong | None = None) -> None:
        self.ctx, self.comm = ctx, comm or ctx.comm("tp")
        self.size, self.me = self.comm.size, int(self.comm.position.cpu().reshape(-1)[0])
        self.k = multiple(self.size)
        self.wrong = Wrong() if wrong is None else wrong
        self._kept: deque[tuple[str, Tensor, Tensor]] = deque()
        self._digests: dict[Comm, dict[str, float]] = {}

    def expect(self, holds: bool, message: str) -> None:
        if not holds:
            self._say(f"{message} on rank {self.ctx.rank}")

    def same(self, what: str, got: Tensor, want: Tensor) -> None:
        """Expect equal bits, dtype and shape."""
        self._right(what, got, Right(want))

    def _right(self, what: str, got: Tensor, right: Right) -> bool:
        if problem := right.problem(got):
            self._say(f"{what} on rank {self.ctx.rank} {problem}")
        return not problem

    def _say(self, message: str) -> None:
        if len(self.wrong) < _TOLD:
            self.wrong.append(f"{message}{self.remedy}")

    def judge(self, what: str, got: Tensor, right: Right, comm: Comm, sent: Tensor | None) -> None:
        """Expect a result as it has to be: contiguous, outside of autograd, in memory that is not that of ``sent``, and
        not changed by what is called later."""
        if right.summed:
            self._digests.setdefault(comm, {})[right.summed] = _digest(got)
        if not self._right(what, got, right) or comm.size == 1:  # which alone may have its input again
            return
        self.expect(got.is_contiguous(), f"the result has strides {got.stride()} and is not contiguous: {what}")
        self.expect(not got.requires_grad, f"the result is in an autograd graph: {what}")
        self.expect(not (got.is_conj() or got.is_neg()), f"the result is conjugated or negated lazily: {what}")
        if got.numel() and sent is not None and self.comm.eager:
            new = got.untyped_storage().data_ptr() != sent.untyped_storage().data_ptr()
            self.expect(new, f"the result is the memory of the input: {what}")
        self._kept.append((what, got, got.detach().clone()))

    def let_go(self, most: int) -> None:
        """All but the latest results are as they were, and who writes to one changes no other."""
        while len(self._kept) > most:
            what, got, then = self._kept.popleft()
            self.expect(not differs(got, then), f"a later call has changed the result: {what}")
            with torch.inference_mode():
                got.zero_()

    def finish(self) -> None:
        self.let_go(0)
        for comm in sorted(self._digests, key=lambda comm: repr(comm.group)):  # ranks may have seen them in any order
            digests = dict(sorted(self._digests[comm].items()))
            told = comm.all_gather(torch.tensor([list(digests.values())]).to(self.ctx.device), 0).cpu()
            for name, column in zip(digests, told.t(), strict=True):
                self.expect(bool((column == column[0]).all()), f"the ranks have different bits of {name}")


def check(body: Callable[Concatenate[RankCheck, P], None]) -> Callable[Concatenate[ParallelContext, P], Wrong]:
    """A check of (ctx, ...), made of one that writes to a ``RankCheck``."""

    def run(ctx: ParallelContext, /, *args: P.args, **named: P.kwargs) -> Wrong:
        check = RankCheck(ctx)
        body(check, *args, **named)
        check.finish()
        return check.wrong

    update_wrapper(run, body)
    return run


def flat(x: Tensor) -> Tensor:
    """In one dim, on the CPU. By strides: those of one element may be any, and a view keeps them."""
    x = x.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return x.as_strided((x.numel(),), (1,))


def differs(got: Tensor, want: Tensor) -> str:
    """A message if a result differs in value, dtype or shape; else empty."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    got, want = flat(got), flat(want)
    integers = {2: torch.int16, 4: torch.int32}.get(got.itemsize, torch.uint8)
    a, b = got.view(integers), want.view(integers)
    if torch.equal(a, b):
        return ""
    i = int((a != b).nonzero()[0]) * a.itemsize // got.itemsize
    where = f" from element {i} on" if i else ""
    is_, not_ = (str(t[i : i + 8].tolist()) for t in (got, want))
    if is_ == not_:  # a byte of 2 for True, another NaN
        is_, not_ = (f"{t[i].item()} of bytes {t[i : i + 1].view(torch.uint8).tolist()}" for t in (got, want))
    return f"is {is_}...{where}, not {not_}..."


def _digest(got: Tensor) -> float:
    """Of its bits, but a NaN may be any."""
    got = flat(got)
    got = torch.where(got.isnan(), 7.0, got) if got.is_floating_point() else got
    return float(int.from_bytes(blake2b(got.view(torch.uint8).numpy().tobytes(), digest_size=2).digest(), "little"))
