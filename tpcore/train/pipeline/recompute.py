"""Recomputation of a stage in backward, so that forward keeps only the stage's input.

``torch.utils.checkpoint`` is not used: its non-reentrant form fails on torch_xla 2.9, which lacks a module
``torch.xla``, and its reentrant form loses the parameters' gradients if the input requires none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime.context import current, use


class _Recomputed(torch.autograd.Function):
    """All tensors that require a gradient are inputs, so that hooks and frozen parameters work as usual."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *others: Tensor) -> Tensor:
        ctx.run, ctx.others = run, others
        ctx.autocast = _autocast(x.device.type)
        ctx.context = current()  # backward of a device runs in a thread of its own, outside of `use`
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # this backward is itself differentiated
        x = x if again else x.detach().requires_grad_(ctx.needs_input_grad[1])
        wanted = [t for t, needs in zip((x, *ctx.others), ctx.needs_input_grad[1:], strict=True) if needs]
        with use(ctx.context), torch.enable_grad(), ctx.autocast():
            y = ctx.run(x)
        found = iter(torch.autograd.grad(y, wanted, grad, allow_unused=True, create_graph=again))
        return None, *(next(found) if needs else None for needs in ctx.needs_input_grad[1:])


def _autocast(kind: str) -> Callable[[], torch.autocast]:
    """A function that makes the present autocast context, to enter it again."""
    if kind == "meta":  # autocast does not support meta
        return lambda: torch.autocast("cpu", enabled=False)
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """``run(x)``, which backward runs again. ``others``: other tensors that it uses and that may need gradients."""
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
    """The backward of the graph that made ``x``, to be run later. It does not keep ``x``."""

    def __init__(self, x: Tensor) -> None:
        self._gradient: list[Tensor] = []
        self._end: Tensor | None = _Later.apply(x, self._gradient) if x.requires_grad else None

    def __call__(self, gradient: Tensor) -> None:
        if self._end is not None:
            self._gradient.append(gradient)
            self._end.backward(torch.zeros_like(self._end))
