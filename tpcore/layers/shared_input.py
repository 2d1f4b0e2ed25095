"""One ``ops.copy`` of an input for all column layers that read it, so that its gradient is summed once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import mappings as ops
from ..comm.comm import Comm
from .linear import ColumnParallelLinear


@dataclass(frozen=True)
class InputCopy:
    """``ops.copy`` of a tensor; with sequence parallelism an all-gather of its tokens."""

    comm: Comm
    sequence_dim: int | None
    dtype: torch.dtype  # lowest precision for the sum of the gradient

    def __call__(self, x: Tensor) -> Tensor:
        if self.sequence_dim is None:
            return ops.copy(x, self.comm, dtype=self.dtype)
        return ops.all_gather(x, self.comm, self.sequence_dim, dtype=self.dtype)


@dataclass(frozen=True)
class _Hook:
    """Replaces one argument of an owner's forward by its copy. Holds neither tensors nor modules."""

    copy: Callable[[Tensor], Tensor]
    argument: str
    position: int

    def __call__(
        self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.argument in kwargs:
            return args, {**kwargs, self.argument: self.copy(kwargs[self.argument])}
        at = self.position
        return (*args[:at], self.copy(args[at]), *args[at + 1 :]), kwargs


def share_input(
    owner: nn.Module,
    *columns: ColumnParallelLinear,
    argument: str = "hidden_states",
    copy: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Let ``columns`` share one copy of an input. ``owner.forward`` calls them on its ``argument``.

    The gradient of that argument is then summed over the tp group once instead of once per column: 2 of 5 all-reduces
    remain in the backward of a Llama block. ``owner.forward`` must use the argument for nothing else, because gradients
    from other uses would be summed too. ``copy``: makes the copy; by default with the group, sequence dim and dtype of
    the columns. A pre-forward hook without state calls it, so that activation checkpointing, ``deepcopy``,
    ``torch.export`` and a second call before the backward work.
    """
    kinds = {(c.tp, c.sequence_dim, c.reduce_dtype) for c in columns}
    if len(kinds) != 1 or any(c.input_is_copied for c in columns):
        said = [
            f"{c.tp.group.axes}, sequence_dim={c.sequence_dim}, {c.reduce_dtype}, input_is_copied={c.input_is_copied}"
            for c in columns
        ]
        raise ValueError(
            f"share_input: the columns of a {type(owner).__name__} need one group, sequence dim and "
            f"reduce_dtype, and inputs that are no copies yet: {said}"
        )
    names = list(inspect.signature(owner.forward).parameters)
    if argument not in names:
        raise ValueError(f"{type(owner).__name__}.forward has no argument {argument!r} but {names}")
    owner.register_forward_pre_hook(
        _Hook(copy or InputCopy(*kinds.pop()), argument, names.index(argument)), with_kwargs=True
    )
    for column in columns:
        column.input_is_copied, column.sequence_dim = True, None
