"""Gradients of several backwards, added in a tree: as many microbatches on fewer ranks of dp have the same sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..private import accumulation_hooks, when_backward_ends
from .context import current, is_initialized


class TreeSum:
    """Sums the gradients of one parameter since it had none: in ``.grad``, as torch does, in another order."""

    into: dict[TreeSum, Tensor] | None = None
    """Where gradients are added instead, in ``held``."""

    def __init__(self, p: Tensor) -> None:
        self._p = ref(p)
        self._parts: list[tuple[int, Tensor]] = []
        """How many backwards each is the sum of, ever fewer: branches that no other of their size has joined yet."""
        self._shown: tuple[Tensor | None, int] = None, 0
        self._before: Tensor | None = None
        p.register_hook(self._put_aside)
        p.register_post_accumulate_grad_hook(self._arrived)

    @property
    def count(self) -> int:
        return sum(count for count, _ in self._parts)

    def _put_aside(self, grad: Tensor) -> None:
        p = self._p()
        if p is not None and p.grad is not None:
            self._before, p.grad = p.grad, None
            when_backward_ends(_PutBack(self))  # torch.autograd.grad calls this hook too, and adds to no ``.grad``

    def put_back(self) -> None:
        p, before, self._before = self._p(), self._before, None
        if p is not None and before is not None:
            p.grad = before

    def _arrived(self, p: Tensor) -> None:
        if p is not self._p() or p.grad is None:  # a copy has its own, and that of the original
            return
        grad, p.grad, self._before = p.grad, self._before, None
        if self.into is None:
            self.add(grad)
        else:
            self.into[self] = self.into[self] + grad if self in self.into else grad

    def add(self, total: Tensor) -> None:
        """Add the gradient of one more backward to ``.grad``."""
        if (p := self._p()) is None:
            return
        shown, version = self._shown
        if p.grad is None:
            self._parts = []
        elif p.grad is not shown or p.grad._version != version:
            self._parts = [(0, p.grad)]  # set or changed by others: what follows is added to it
        count = 1
        while self._parts and self._parts[-1][0] == count:
            count, total = 2 * count, self._parts.pop()[1] + total
        self._parts.append((count, total))
        for _, part in reversed(self._parts[:-1]):
            total = part + total
        p.grad = total
        self._shown = total, total._version


class _PutBack:
    """Called when a backward ends, or dropped where it raises: puts the gradient back that was put aside."""

    def __init__(self, of: TreeSum) -> None:
        self.of = of

    def __call__(self) -> None:
        self.of.put_back()

    __del__ = __call__


def _sum_of(p: Tensor) -> TreeSum | None:
    owners = (getattr(hook, "__self__", None) for hook in accumulation_hooks(p).values())
    return next((owner for owner in owners if isinstance(owner, TreeSum) and owner._p() is p), None)


def sum_in_tree(parameters: Iterable[Tensor]) -> None:
    """Let gradients of ``parameters`` be added in a tree from now on, in a ``reproducible`` job."""
    for p in parameters if current().reproducible is not None else ():
        if p.requires_grad and _sum_of(p) is None:
            TreeSum(p)


def sums_of(parameters: Iterable[Tensor]) -> list[TreeSum]:
    """Those of ``parameters`` that have one."""
    return [of for p in parameters if (of := _sum_of(p)) is not None] if current().reproducible is not None else []


@contextmanager
def held(sums: Iterable[TreeSum], into: dict[TreeSum, Tensor]) -> Iterator[None]:
    """Inside, what backward gives the parameters of ``sums`` is added in ``into``, and their ``.grad`` stays."""
    for of in sums:
        of.into = into
    try:
        yield
    finally:
        for of in sums:
            of.into = None


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
