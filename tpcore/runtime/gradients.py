"""Gradients of several backwards, added in a tree: as many microbatches on fewer ranks of dp have the same sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..private import accumulation_hooks
from .context import current, is_initialized


class TreeSum:
    """Sums the gradients of one parameter since it had none: in ``.grad``, as torch does, in another order."""

    def __init__(self, p: Tensor) -> None:
        self._p = ref(p)
        self._parts: list[tuple[int, Tensor]] = []
        """How many backwards each is the sum of, ever fewer: branches that no other of their size has joined yet."""
        self._shown: tuple[Tensor | None, int] = None, 0
        p.register_hook(self._before)
        p.register_post_accumulate_grad_hook(self._after)

    @property
    def count(self) -> int:
        return sum(count for count, _ in self._parts)

    def _before(self, grad: Tensor) -> None:
        p = self._p()
        if p is None:
            return
        shown, version = self._shown
        if p.grad is None:
            self._parts = []
        elif p.grad is not shown or p.grad._version != version:
            self._parts = [(0, p.grad)]  # set or changed by others: what follows is added to it
        p.grad = None

    def _after(self, p: Tensor) -> None:
        if p is not self._p() or p.grad is None:  # a copy has its own, and that of the original
            return
        count, total = 1, p.grad
        while self._parts and self._parts[-1][0] == count:
            count, total = 2 * count, self._parts.pop()[1] + total
        self._parts.append((count, total))
        for _, part in reversed(self._parts[:-1]):
            total = part + total
        p.grad = total
        self._shown = total, total._version


def _sum_of(p: Tensor) -> TreeSum | None:
    owners = (getattr(hook, "__self__", None) for hook in accumulation_hooks(p).values())
    return next((owner for owner in owners if isinstance(owner, TreeSum) and owner._p() is p), None)


def sum_in_tree(parameters: Iterable[Tensor]) -> None:
    """Let gradients of ``parameters`` be added in a tree from now on, in a ``reproducible`` job."""
    for p in parameters if current().reproducible is not None else ():
        if p.requires_grad and _sum_of(p) is None:
            TreeSum(p)


def check_sums(parameters: Iterable[Tensor]) -> None:
    """In a ``reproducible`` job, raise ValueError for gradients that are added in another order at another dp."""
    if (most := current().reproducible) is None:
        return
    for i, p in enumerate(parameters):
        of = _sum_of(p)
        if p.grad is not None and of is None:
            raise ValueError(
                f"reproducible={most}: torch adds the gradients of parameter {i}, of shape {tuple(p.shape)}, one by "
                "one, for it was made before tpcore.init, or frozen: make the model, or a tpcore.Zero1, before backward"
            )
        if of is not None and p.grad is not None and (count := of.count) & (count - 1):
            raise ValueError(
                f"reproducible={most}: ranks of dp could not share a sum of {count} gradients: take microbatches in a "
                "power of two"
            )


@contextmanager
def summed_in_trees() -> Iterator[None]:
    """Inside, parameters of modules that are made in a ``reproducible`` job add their gradients in a tree."""

    def watch(module: nn.Module, name: str, p: Any) -> None:
        if p is not None and is_initialized():
            sum_in_tree([p])

    handle = register_module_parameter_registration_hook(watch)
    try:
        yield
    finally:
        handle.remove()
