"""Logits in a training step: a rank has its part of the vocabulary, and whoever reads them sees the whole."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpcore import nested
from tpcore.comm import mappings as ops
from tpcore.comm.mappings import Map
from tpcore.comm.observer import plain
from tpcore.private import plain_functions

_FACTS = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point, Tensor.__len__}
    | {Tensor.ndimension, Tensor.nelement, Tensor.element_size, Tensor.get_device, Tensor.is_complex, torch.is_complex}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize")}
    | {getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "is_meta", "is_cpu")}
)
_BY_ENTRY = frozenset(
    {Tensor.float, Tensor.to, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.detach, Tensor.tanh, torch.tanh}
    | {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__}
)
"""Of which the part of the result is the result of the part."""
_OF_GRADIENTS = frozenset({Tensor.retain_grad, inspect.unwrap(Tensor.register_hook)})  # a job wraps it


class _Whole(torch.autograd.Function):
    """What code below Python's functions gets: the shape, no values, and the way back for a gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: tuple[int, ...], spread: Map) -> Tensor:
        ctx.spread = spread
        return torch.full((), torch.nan, dtype=part.dtype, device=part.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.spread(grad), None, None


class Logits(Tensor):
    """Gathered when they are first read, by all ranks: a loss that knows the parts need not."""

    part: Tensor
    to_whole: Map
    to_part: Map
    """From a gradient of the whole to that of the part."""
    read: Tensor | None

    @classmethod
    def of(cls, part: Tensor, shape: tuple[int, ...], gather: Map, spread: Map) -> Tensor:
        # tensors of a mode of torch's own, such as those without memory, take no other class
        if type(plain(part)) not in (Tensor, cls):
            return gather(part)
        logits: Logits = _Whole.apply(part, shape, spread).as_subclass(cls)
        logits.part, logits.to_whole, logits.to_part, logits.read = part, gather, spread, None
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with plain_functions():
                return func(*args, **kwargs)
        if getattr(func, "__wrapped__", func) in _OF_GRADIENTS:
            raise ValueError(
                "in a training step the loss is computed of each rank's part of the logits, and the whole has no "
                "gradient: call model.eval(), in which logits and their loss are whole"
            )
        x = args[0] if args else None
        if func in _BY_ENTRY and isinstance(x, Logits) and x._stays and _is_number(args[1:]):
            return Logits.of(func(x.part, *args[1:], **kwargs), x.shape, x.to_whole, x.to_part)
        args, kwargs = nested.mapped(Logits.whole, (args, kwargs), Logits)
        return func(*args, **kwargs)

    @property
    def _stays(self) -> bool:
        # a function of autograd computes without a graph, and gives its result one, of which the part would not know
        return self.read is None and (torch.is_grad_enabled() or not self.part.requires_grad)

    def words(self) -> tuple[Tensor, int]:
        """This rank's part of the vocabulary, all of it where the parts are others, and the size of all."""
        of_words = self.read is None and self.part.shape[-1] != self.shape[-1]
        return self.part if of_words else self.whole(), self.shape[-1]

    def whole(self) -> Tensor:
        """All logits, on every rank. Collective when it is first called."""
        if self.read is None:
            with torch.enable_grad():  # who reads them first may need no gradient
                self.read = self.to_whole(self.part)
        return self.read


def _is_number(others: tuple[Any, ...]) -> bool:
    """Whether none of the other arguments has entries of its own, or a gradient, which would be this part's."""
    return not any(isinstance(t, Tensor) and (t.ndim or t.requires_grad) for t in others)


def keep_parts(head: Any, args: Any, output: Tensor) -> Tensor:
    """A hook of a head whose output is this rank's part: in training it stays that, until it is read."""
    gather = partial(_gathered, head)
    if not head.training or ops.transformed():
        return gather(output)
    return Logits.of(output, (*output.shape[:-1], head.out_features), gather, partial(_part_of, head))


def _gathered(head: Any, part: Tensor) -> Tensor:
    return head.features.gathered(part, head.tp)  # type: ignore[no-any-return]


def _part_of(head: Any, whole: Tensor) -> Tensor:
    return head.features.mask(head.features.scatter(whole, head.tp), head.tp)  # type: ignore[no-any-return]
