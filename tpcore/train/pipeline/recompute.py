"""Running a stage again in backward, so that forward keeps its input alone.

``torch.utils.checkpoint`` is not used: its form without reentry fails on torch_xla 2.9, which lacks a module
``torch.xla``, and the reentrant one loses the gradients of parameters where the input takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Recomputed(torch.autograd.Function):
    """Everything that takes a gradient is an input, so that hooks and frozen parameters work as elsewhere."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *others: Tensor) -> Tensor:
        ctx.run, ctx.others = run, others
        ctx.autocast = _autocast(x.device.type)
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        wanted = [t for t, needs in zip((x, *ctx.others), ctx.needs_input_grad[1:], strict=True) if needs]
        with torch.enable_grad(), ctx.autocast():
            y = ctx.run(x)
        found = iter(torch.autograd.grad(y, wanted, grad, allow_unused=True))
        return None, *(next(found) if needs else None for needs in ctx.needs_input_grad[1:])


def _autocast(kind: str) -> Callable[[], torch.autocast]:
    """The autocast in force, to be entered again."""
    if kind == "meta":  # which autocast does not know
        return lambda: torch.autocast("cpu", enabled=False)
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """``run(x)``, run again when its gradient is asked for. ``others``: what else it uses that may take one.

    Gradients of gradients cannot be had.
    """
    y: Tensor = _Recomputed.apply(run, x, *(t for t in others if t.requires_grad))
    return y


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


class Backward:
    """The backward of what led to a tensor, to be run later, and without keeping that tensor."""

    def __init__(self, x: Tensor) -> None:
        self._gradient: list[Tensor] = []
        self._end: Tensor | None = _Later.apply(x, self._gradient) if x.requires_grad else None

    def __call__(self, gradient: Tensor) -> None:
        if self._end is not None:
            self._gradient.append(gradient)
            self._end.backward(torch.zeros_like(self._end))
