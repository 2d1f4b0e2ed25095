"""The gradients of one step: in ``.grad``, or summed in a wider dtype."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor


class Accumulation:
    """With a ``dtype``, sums the gradients of several backwards in it, and frees ``.grad`` at once."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._sums: dict[Tensor, Tensor] = {}
        self._handles: dict[Tensor, int] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of these parameters from now on. A move to another device loses the hook: call it again."""
        for p in parameters if self._dtype is not None else ():
            hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
            if p.requires_grad and self._handles.get(p) not in hooks:
                self._handles[p] = p.register_post_accumulate_grad_hook(AddHook(weakref.ref(self))).id

    def add(self, p: Tensor) -> None:
        if p.grad is None or self._dtype is None:
            return
        grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
        if p in self._sums:
            self._sums[p].add_(grad)
        else:
            self._sums[p] = grad.to(self._dtype, copy=True)
        p.grad = None

    def of(self, p: Tensor) -> Tensor | None:
        self.add(p)  # a gradient that was set by hand, or before the hook
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()  # the ranks' sparse gradients have different rows
        return self._sums.get(p, p.grad)

    def dtype_of(self, p: Tensor) -> torch.dtype:
        return self._dtype or p.dtype

    def drop(self, p: Tensor) -> None:
        self._sums.pop(p, None)
        p.grad = None


class AddHook:
    """A parameter's hook after a gradient is accumulated. It keeps no optimizer alive."""

    def __init__(self, sums: weakref.ref[Accumulation]) -> None:
        self._sums = sums

    def __call__(self, p: Tensor) -> None:
        sums = self._sums()
        if sums is not None:
            sums.add(p)

    def __deepcopy__(self, memo: object) -> AddHook:
        return AddHook(self._sums)
