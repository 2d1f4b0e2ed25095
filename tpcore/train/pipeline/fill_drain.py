"""A pipeline as one differentiable function: forward of all microbatches, then autograd's backward of all.

GPipe (Huang et al. 2019, arXiv:1811.06965) as one program for all ranks: at every tick each stage runs its
layers, and a permutation of the ring moves their output to the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...comm import mappings as ops
from ...comm.comm import Comm
from .arguments import LayerArguments
from .recompute import recomputed
from .schedule import Schedule
from .stage import StageLayers


def tick(number: int, like: Tensor) -> Tensor:
    """``number`` as a one-element tensor, moved to the device so that it is no constant of a program."""
    return torch.tensor([number]).to(like.device)


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``torch.where`` by a one-element condition. No product with a mask: zero times infinity is NaN."""
    return torch.where(condition.view([1] * a.ndim), a, b)


class _Cut(torch.autograd.Function):
    """The identity; its backward ends a program."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: Callable[[], None]) -> Tensor:
        ctx.end = end
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.end()
        return grad, None


@dataclass(frozen=True)
class FillDrain:
    """``run`` computes a batch through all stages; the result is the same on every stage. ``shared``: arguments that
    every microbatch gets whole. ``cut``: ends a program, on lazy backends."""

    stage: StageLayers
    pp: Comm
    schedule: Schedule
    parameters: list[Tensor]
    recompute: bool
    shared: Collection[str] | None
    cut: Callable[[], None] | None

    def run(self, x: Tensor, arguments: LayerArguments, seed: int | None) -> Tensor:
        first, last = self.pp.position == 0, self.pp.position == self.pp.size - 1
        # only stage 0 uses the input, so its gradient is summed over stages; all stages use the arguments
        feeds = list(ops.copy(x, self.pp).chunk(self.schedule.microbatches))
        every = arguments.mapped(lambda t, name: ops.copy(t, self.pp) if t.requires_grad else t)
        if self.cut is not None:  # in buffers of their own, a tick's program does not know which it reads
            feeds = [feed.clone() for feed in feeds]
            self.cut()
        # real activations in the bubble too: a norm of zeros may be NaN
        state, made = feeds[0], []
        for t in range(self.schedule.ticks):
            feed = feeds[self.schedule.entering(t)]
            y = self._tick(t, feed if self.pp.size == 1 else where(first, feed, state), every, len(x), seed)
            if self.schedule.leaving(t) is not None:
                made.append(y)
            if t + 1 < self.schedule.ticks:
                state = ops.shift(y, self.pp)
            if self.cut is not None:
                self.cut()
        out = torch.cat(made)
        if self.pp.size == 1:
            return out
        return ops.reduce(where(last, out, torch.zeros_like(out)), self.pp)

    def _tick(self, t: int, x: Tensor, every: LayerArguments, batch: int, seed: int | None) -> Tensor:
        """This stage's output for ``x`` at tick ``t``."""
        count = self.schedule.microbatches
        index = (tick(t, x) - self.pp.position).clamp(0, count - 1)
        call = self.stage.run(
            lambda: every.microbatch(index, count, batch, self.shared),
            seed,
            self.schedule.forward_of(t)[self.stage.place],
            check=t == 0,
        )
        if not torch.is_grad_enabled():
            return call(x)
        if self.cut is not None:
            x = _Cut.apply(x, self.cut)
        return recomputed(call, x, [*every.tensors(), *self.parameters]) if self.recompute else call(x)
