"""Differentiable mappings of a ``reproducible`` job: a copy, and a partial sum, for each block that a rank adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .comm import Comm
from .mappings import collect, sum_dtype
from .observer import plain
from .order import tree

CommSpec = tuple[Comm, int | None, torch.dtype | None]
"""The Comm, the sequence dim (None without sequence parallelism), and the least precision to sum in."""
COPIES = "tpcore_copies"
"""Attribute of a tensor with copies of it, of ``shared``."""


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: CommSpec, count: int) -> tuple[Tensor, ...]:
        comm, seq, _ = spec
        ctx.spec = spec
        whole = x if seq is None else comm.all_gather(x, seq)
        return tuple(whole.view_as(whole) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return total(grads, ctx.spec), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: CommSpec, *parts: Tensor) -> Tensor:
        comm, seq, dtype = spec
        ctx.spec, ctx.count = spec, len(parts)
        y = tree([part.to(sum_dtype(part, dtype)) for part in parts])
        y = comm.all_reduce(y, donate=y is not parts[0]) if seq is None else comm.reduce_scatter(y, seq)
        return y.to(parts[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *copies(grad, ctx.spec, ctx.count)


def copies(x: Tensor, spec: CommSpec, count: int | None = None) -> tuple[Tensor, ...]:
    """``copy`` or ``all_gather``, for each of the Comm's ``blocks`` or ``count`` of them. Backward adds their gradients
    in one tree."""
    copied: tuple[Tensor, ...] = _Copies.apply(plain(x), spec, count or spec[0].blocks or 1)
    return copied


def shared(x: Tensor, spec: CommSpec) -> Tensor:
    """All tokens of ``x``, marked with ``copies`` for all layers that read them, whose gradients are so summed once."""
    comm, seq, dtype = spec
    y = x.view_as(x) if seq is None else collect(x, comm, seq)
    setattr(y, COPIES, copies(y, (comm, None, dtype)))
    return y


def total(parts: Sequence[Tensor], spec: CommSpec) -> Tensor:
    """``reduce`` or ``reduce_scatter`` of this rank's partial sums, added in one tree."""
    y: Tensor = _Total.apply(spec, *parts)
    return y
