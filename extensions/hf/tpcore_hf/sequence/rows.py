"""Whole rows of tokens that are dealt to the ranks of cp, for what outside of attention asks about all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from tpcore import nested
from tpcore.layers.tokens import TokenOrder

from ..plan.inputs import OURS, is_watched
from .batch import DealtTokens

_WHOLE, _DEALT = "_tpcore_whole", "_tpcore_dealt"


def see_whole(module: nn.Module, context: DealtTokens, always: bool) -> None:
    """Let ``module``, which is outside of the layers, run on whole rows where a hook that is not tpcore's may ask how
    many tokens there are, as NEFTune's noise does; or ``always``."""
    original = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context, always = self.__dict__[_WHOLE]
        run = partial(original.__call__, self)
        return _over_whole(context, run, args, kwargs) if always or is_watched(self, own=OURS) else run(*args, **kwargs)

    module.__dict__[_WHOLE] = context, always
    module.__class__ = _subclass(original, __call__=call)


def deal_inside(model: nn.Module, context: DealtTokens) -> None:
    """Let ``model`` deal the tokens in its forward, so that its hooks are around whole sequences."""
    original = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context: DealtTokens = self.__dict__[_DEALT]
        kwargs = context.before(self, args, kwargs)
        return context.after(kwargs, original.forward(self, **kwargs), training=self.training)

    model.__dict__[_DEALT] = context
    model.__class__ = _subclass(original, forward=wraps(original.forward)(forward))


def _subclass(original: type[nn.Module], **methods: Any) -> type[nn.Module]:
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), names | methods)


def _over_whole(context: DealtTokens, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """This rank's tokens of what ``call`` makes of whole rows, whose arguments are this rank's."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim in (2, 3)]
    if context.rows_are_whole or not tensors:
        return call(*args, **kwargs)
    tokens = tensors[0].shape[1]
    order, length = context.order(tokens * context.comm.size), tokens * context.comm.size

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim == 4 and value.shape[1:3] == (1, 1):  # made by ``deal``
            return value[:, 0, 0] if value.dtype == torch.bool else None
        of_tokens = isinstance(value, Tensor) and value.ndim in (2, 3) and value.shape[1] == tokens
        return order.whole(value) if of_tokens else value

    def cut(t: Tensor) -> Tensor:
        return order.cut(t) if t.ndim > 1 and t.shape[1] == length else t

    context.rows_are_whole = True  # for modules inside
    try:
        output = call(*map(whole, args), **{name: whole(value) for name, value in kwargs.items()})
    finally:
        context.rows_are_whole = False
    return nested.mapped(cut, output)


class DealtRows:
    """Of what a layer of experts is given, ``[rows times tokens, ...]``, in calls of the module around it."""

    def __init__(self, context: DealtTokens, layer: nn.Module, around: nn.Module) -> None:
        self.comm, self._context, self._layer = context.comm, context, type(layer).__name__
        self._rows: int | None = None
        around.register_forward_pre_hook(self._enter, with_kwargs=True)
        around.register_forward_hook(self._leave, always_call=True)

    def _enter(self, around: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim == 3), None)
        self._rows = None if hidden is None else len(hidden)

    def _leave(self, around: nn.Module, args: Any, output: Any) -> None:
        self._rows = None

    def _of(self, x: Tensor, ranks: int) -> tuple[TokenOrder, Tensor]:
        if self._rows is None:
            raise ValueError(
                f"capacity_factor over cp={self.comm.size}: {self._layer} is called, or recomputed, outside of the "
                "module that takes [batch, tokens, size], so that whole sequences are not known"
            )
        by_row = x.unflatten(0, (self._rows, -1))
        return self._context.order(by_row.shape[1] * ranks), by_row

    def whole(self, x: Tensor) -> Tensor:
        order, by_row = self._of(x, self.comm.size)
        return order.whole(by_row).flatten(0, 1)

    def cut(self, x: Tensor) -> Tensor:
        order, by_row = self._of(x, 1)
        return order.cut(by_row).flatten(0, 1)
