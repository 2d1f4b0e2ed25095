"""Which microbatch a stage runs at each tick, and steps of a tick's program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...layers.fused import autocast_of
from ...runtime.context import current, use


@dataclass(frozen=True)
class Schedule:
    """All stages in lockstep: at tick ``t`` stage ``r`` runs microbatch ``t - r`` forward.

    In one forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2) the same tick also
    runs the backward of microbatch ``t - 2 (stages - 1) + r``. The parts of the model before and after its
    layers run on all stages, each with its part of the vocabulary.
    """

    stages: int
    microbatches: int

    @property
    def ticks(self) -> int:
        """The ticks of a forward; its backward has as many."""
        return self.microbatches + self.stages - 1

    @property
    def step_ticks(self) -> int:
        """The ticks of a step with one forward, one backward."""
        return self.microbatches + 2 * (self.stages - 1)

    @property
    def bubble(self) -> float:
        """The fraction of ticks at which a stage works on no microbatch. It is equal for both schedules: the first and
        last ticks of one forward, one backward do half the work."""
        return (self.stages - 1) / self.ticks

    @property
    def inputs_held(self) -> int:
        """The most stage inputs that one forward, one backward stores, for any number of microbatches."""
        return min(2 * self.stages - 1, self.ticks)

    def entering(self, tick: int) -> int:
        """The microbatch whose forward stage 0 runs; in the bubble at the end the last one again."""
        return min(tick, self.microbatches - 1)

    def leaving(self, tick: int) -> int | None:
        """The microbatch whose forward ends at this tick, if any."""
        return self._microbatch(tick - self.stages + 1)

    def returned(self, tick: int) -> int | None:
        """The microbatch whose backward ends on stage 0 at this tick, if any."""
        return self._microbatch(tick - 2 * (self.stages - 1))

    def forward_of(self, tick: int) -> list[int]:
        """For each stage, the microbatch whose forward it runs; in the bubble the nearest one."""
        return [self._nearest(tick - r) for r in range(self.stages)]

    def backward_of(self, tick: int) -> list[int]:
        """For each stage, the microbatch whose backward it runs; in the bubble the nearest one."""
        return [self._nearest(tick - 2 * (self.stages - 1) + r) for r in range(self.stages)]

    def _microbatch(self, number: int) -> int | None:
        return number if 0 <= number < self.microbatches else None

    def _nearest(self, number: int) -> int:
        return min(max(number, 0), self.microbatches - 1)


class Recomputed(torch.autograd.Function):
    """All tensors that require a gradient are inputs, so that hooks and frozen parameters work as usual.

    ``torch.utils.checkpoint`` is not used: its non-reentrant form fails on torch_xla 2.9, which lacks a module
    ``torch.xla``, and its reentrant form loses the parameters' gradients if the input requires none.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *others: Tensor) -> Tensor:
        ctx.run, ctx.others = run, others
        ctx.autocast = autocast_of(x.device.type)
        ctx.context = current()  # backward of a device runs in a thread of its own, outside of `use`
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # this backward is itself differentiated
        x = x if again else x.detach().requires_grad_(ctx.needs_input_grad[1])
        inputs = [t for t, needs in zip((x, *ctx.others), ctx.needs_input_grad[1:], strict=True) if needs]
        with use(ctx.context), torch.enable_grad(), ctx.autocast():
            y = ctx.run(x)
        grads = iter(torch.autograd.grad(y, inputs, grad, allow_unused=True, create_graph=again))
        return None, *(next(grads) if needs else None for needs in ctx.needs_input_grad[1:])


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


class Backward:
    """The backward of the graph that made ``x``, to be run later. It does not keep ``x``."""

    def __init__(self, x: Tensor) -> None:
        self._gradient: list[Tensor] = []
        self._end: Tensor | None = _Later.apply(x, self._gradient) if x.requires_grad else None

    def __call__(self, gradient: Tensor) -> None:
        if self._end is not None:
            self._gradient.append(gradient)
            self._end.backward(torch.zeros_like(self._end))


def tick(number: int, like: Tensor) -> Tensor:
    """``number`` as a one-element tensor, moved to the device so that it is no constant of a program."""
    return torch.tensor([number]).to(like.device, non_blocking=True)


def is_microbatch(number: Tensor, count: int) -> Tensor:
    """``[1]``: whether a stage at a tick works on one of ``count`` microbatches, and not in the bubble."""
    return (number >= 0) & (number < count)


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``torch.where`` by a one-element condition. No product with a mask: zero times infinity is NaN."""
    return torch.where(condition.view([1] * a.ndim), a, b)
