"""Differentiable mappings, written once for every backend. Each is a linear map and its transpose. The names are
those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022,
arXiv:2205.05198). ``dtype`` is the least precision of a sum; the result has the dtype of the input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..private import in_transform
from .comm import Comm
from .observer import plain
from .transport import inverse

Map = Callable[[Tensor], Tensor]
FEATURES = "tpcore_features"
"""Attribute of a layer's output with padding or in an order of its own, and of no result of an operation on it."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, forward: Map, transpose: Map) -> Tensor:
        ctx.comm, ctx.maps = comm, (transpose, forward)
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # again a mapping, so that gradients of gradients cross the ranks too
        return _linear(grad, ctx.comm, *ctx.maps), None, None, None


class _Transformed(_Linear):
    """Also for forward mode and torch.func. A class of its own: torch.compile takes none with a ``jvp``."""

    @staticmethod
    def forward(x: Tensor, comm: Comm, forward: Map, transpose: Map) -> Tensor:  # type: ignore[override]
        return forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.comm, forward, transpose = inputs
        ctx.maps = transpose, forward

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        transpose, forward = ctx.maps
        return _linear(tangent, ctx.comm, forward, transpose)

    @staticmethod
    def vmap(_: Any, dims: Any, x: Tensor, *maps: Any) -> tuple[Tensor, int]:
        return torch.stack([_linear(row, *maps) for row in x.movedim(dims[0], 0)]), 0


def transformed() -> bool:
    """Whether forward mode or a transform of torch.func is on, which know only these mappings."""
    return forward_ad._current_level >= 0 or in_transform()


def _linear(x: Tensor, comm: Comm, forward: Map, transpose: Map) -> Tensor:
    if comm.size == 1:
        # Not through autograd, which forbids in-place ops on a Function's unchanged output. With ``blocks`` the
        # gradients of all that read it meet here, as they do on several ranks: else they are added in another order.
        return x if comm.blocks is None else x.view_as(x)
    y: Tensor = (_Transformed if transformed() else _Linear).apply(plain(x), comm, forward, transpose)
    return y


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def sum_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to sum ``x`` in: ``dtype``, but never less precise than ``x`` itself."""
    return x.dtype if dtype is None else torch.promote_types(x.dtype, dtype)


def _all_reduce(x: Tensor, comm: Comm, dtype: torch.dtype | None) -> Tensor:
    wide = x.to(sum_dtype(x, dtype))
    return comm.all_reduce(wide, donate=wide is not x).to(x.dtype)


def _reduce_scatter(x: Tensor, comm: Comm, dim: int, dtype: torch.dtype | None) -> Tensor:
    return comm.reduce_scatter(x.to(sum_dtype(x, dtype)), dim).to(x.dtype)


def copy(x: Tensor, comm: Comm, *, dtype: torch.dtype | None = None) -> Tensor:
    """Replicated -> one copy per rank. Backward sums the copies' gradients."""
    return _linear(x, comm, _same, partial(_all_reduce, comm=comm, dtype=dtype))


def reduce(x: Tensor, comm: Comm, *, dtype: torch.dtype | None = None) -> Tensor:
    """Partial sums -> replicated."""
    return _linear(x, comm, partial(_all_reduce, comm=comm, dtype=dtype), _same)


def largest(x: Tensor, comm: Comm) -> Tensor:
    """The largest on all ranks, without a gradient."""
    return _linear(x.detach(), comm, partial(comm.all_reduce, op="max"), _same)


def scatter(x: Tensor, comm: Comm, dim: int = -1) -> Tensor:
    """Replicated -> this rank's chunk."""
    return _linear(x, comm, partial(comm.split, dim=dim), partial(comm.all_gather, dim=dim))


def collect(x: Tensor, comm: Comm, dim: int = -1) -> Tensor:
    """Chunks -> replicated, whatever they are."""
    return _linear(x, comm, partial(comm.all_gather, dim=dim), partial(comm.split, dim=dim))


def gather(x: Tensor, comm: Comm, dim: int = -1, *, size: int | None = None) -> Tensor:
    """Chunks -> replicated. The output of a layer comes in the order of its features, without padding. ``size``: of the
    dim without padding, where other operations follow a padded layer; it is a ValueError to leave it out there."""
    last = dim in (-1, x.ndim - 1)
    if last and size is None and (layer := getattr(x, FEATURES, None)) is not None:
        return layer.restored(collect(x, comm, dim))  # type: ignore[no-any-return]
    if last and size is None and x.shape[-1] in comm.padded:
        raise ValueError(
            f"gather: a layer with pad=True makes {x.shape[-1]} features on each of {comm.size} ranks, as many as "
            "these; their padding would be among the features of all: pass size=, the number without padding "
            f"({x.shape[-1] * comm.size} if there is none)"
        )
    whole = collect(x, comm, dim)
    return whole if size is None else whole.narrow(dim, 0, size)


def all_gather(x: Tensor, comm: Comm, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Chunks -> one full copy per rank (enter a tp region from sequence parallel)."""
    back = partial(_reduce_scatter, comm=comm, dim=dim, dtype=dtype)
    return _linear(x, comm, partial(comm.all_gather, dim=dim), back)


def reduce_scatter(x: Tensor, comm: Comm, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Partial sums -> this rank's chunk (leave a tp region into sequence parallel)."""
    forward = partial(_reduce_scatter, comm=comm, dim=dim, dtype=dtype)
    return _linear(x, comm, forward, partial(comm.all_gather, dim=dim))


def all_to_all(x: Tensor, comm: Comm, split_dim: int, concat_dim: int) -> Tensor:
    """Chunks along ``concat_dim`` -> chunks along ``split_dim`` (tokens <-> heads, tokens <-> experts)."""
    forward = partial(comm.all_to_all, split_dim=split_dim, concat_dim=concat_dim)
    return _linear(x, comm, forward, partial(comm.all_to_all, split_dim=concat_dim, concat_dim=split_dim))


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad / ctx.count, None


def averaged(x: Tensor, comm: Comm) -> Tensor:
    """``x``. Backward divides its gradient, which has the sum over the ranks already, by their number."""
    if transformed():
        constant = x.detach()
        return constant + (x - constant) / comm.size
    y: Tensor = x if comm.size == 1 else _Averaged.apply(x, comm.size)
    return y


def shift(x: Tensor, comm: Comm, step: int = 1) -> Tensor:
    """Each rank's ``x`` -> the rank ``step`` further on the ring. Backward shifts the other way."""
    to = tuple((i + step) % comm.size for i in range(comm.size))
    return _linear(x, comm, partial(comm.permute, to=to), partial(comm.permute, to=inverse(to)))
