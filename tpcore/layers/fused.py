"""A matmul and its collective in one autograd function, so that the two can overlap and share memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import mappings as ops
from ..comm.blocks import CommSpec, shared
from ..comm.observer import plain
from . import quantized

Affine = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Forward = Callable[[Tensor, Tensor, Tensor | None, "CommSpec"], Tensor]


def enter(x: Tensor, spec: CommSpec) -> Tensor:
    """All tokens of ``x``, a copy for each rank. Backward sums the copies' gradients."""
    comm, seq, dtype = spec
    if comm.blocks is not None:
        return shared(x, spec)
    return ops.copy(x, comm, dtype=dtype) if seq is None else ops.all_gather(x, comm, seq, dtype=dtype)


def leave(y: Tensor, spec: CommSpec) -> Tensor:
    """The sum of the ranks' ``y``; with sequence parallelism this rank's tokens of it."""
    comm, seq, dtype = spec
    return ops.reduce(y, comm, dtype=dtype) if seq is None else ops.reduce_scatter(y, comm, seq, dtype=dtype)


def autocast_of(device: str) -> Callable[[], torch.autocast]:
    """Makes the present autocast context, or its absence, once more: for what backward computes again."""
    # for "meta", where steps are recorded, autocast is an error
    if not torch.amp.is_autocast_available(device):
        return partial(torch.autocast, "cpu", enabled=False)
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def autocasted(x: Tensor, weight: Tensor, bias: Tensor | None, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of a matmul as torch's autocast has them, which leaves float64 as it is."""
    if x.is_meta or not torch.is_autocast_enabled(device):  # ("meta") is an error
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    cast = [t if t is None or t.dtype is torch.float64 else t.to(dtype) for t in (x, weight, bias)]
    return cast[0], cast[1], cast[2]  # type: ignore[return-value]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _widen(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``x`` in the dtype to sum it in."""
    # compared first: even a ``to`` that changes nothing takes a microsecond
    return x if x.dtype is dtype else x.to(ops.sum_dtype(x, dtype))


def _sum_of_rows(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    # XLA sums float16 in float16 (32 rows on a CPU: off by 1.2 times two roundings); torch's kernels do not
    return x.sum(0) if x.dtype is dtype else x.sum(0, dtype=ops.sum_dtype(x, dtype)).to(x.dtype)


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _mapped_column(x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec, linear: Affine = F.linear) -> Tensor:
    return linear(enter(x, spec), weight, bias)


def _mapped_row(x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec, linear: Affine = F.linear) -> Tensor:
    comm, seq, dtype = spec
    y = leave(linear(x, weight, None), spec)
    if bias is None:
        return y
    return y + (bias if seq is None else ops.copy(bias, comm, dtype=dtype))


def _again(ctx: Any, grad: Tensor, mapped: Forward) -> tuple[Tensor | None, ...]:
    """The gradients in a backward that is itself differentiated (create_graph): autograd's of ``mapped``, the same
    function as several mappings, of which each is differentiable any number of times."""
    x, weight = ctx.saved_tensors
    # any bias has the same derivatives
    bias = grad.new_zeros(len(weight), requires_grad=True) if ctx.needs_input_grad[2] else None
    inputs = [t for t, needs in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needs]
    gradients = iter(torch.autograd.grad(mapped(x, weight, bias, ctx.spec), inputs, grad, create_graph=True))
    return tuple(next(gradients) if needs else None for needs in ctx.needs_input_grad)


def _column(x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec) -> Tensor:
    comm, seq, _ = spec
    return F.linear(x if seq is None else comm.all_gather(x, seq), weight, bias)


class _Column(torch.autograd.Function):
    """Forward sends nothing (sequence parallel: it gathers the input). Backward overlaps the
    all-reduce of the input gradient with the matmul of the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spec = spec
        return _column(x, weight, bias, spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _again(ctx, grad, _mapped_column)
        x, weight = ctx.saved_tensors
        comm, seq, dtype = ctx.spec
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = _rows(grad)
        grad_x = grad_weight = grad_bias = None
        wait: Callable[[], Tensor] | None = None
        if needs_x:
            partial_sum = _widen(rows.mm(weight), dtype)
            if seq is None:
                wait = comm.start_all_reduce(partial_sum, donate=True)
            else:
                partial_sum = partial_sum.view(*grad.shape[:-1], weight.shape[1])
                grad_x = _narrow(comm.reduce_scatter(partial_sum, seq), x.dtype)
        if needs_weight:
            # gathered again, not kept from forward: sequence parallelism exists to save that memory
            grad_weight = rows.t().mm(_rows(x if seq is None else comm.all_gather(x, seq)))
        if needs_bias:
            grad_bias = _sum_of_rows(rows, dtype)
        if wait is not None:
            grad_x = _narrow(wait(), x.dtype).view(x.shape)
        return grad_x, grad_weight, grad_bias, None


def _row(x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec) -> Tensor:
    comm, seq, dtype = spec
    y = F.linear(x, weight)
    wide = _widen(y, dtype)
    out = comm.all_reduce(wide, donate=True) if seq is None else comm.reduce_scatter(wide, seq)
    out = _narrow(out, y.dtype)
    return out if bias is None else out.add_(bias)


class _Row(torch.autograd.Function):
    """Forward sums over the ranks. Backward sends nothing (sequence parallel: it gathers the gradient)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spec = spec
        return _row(x, weight, bias, spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _again(ctx, grad, _mapped_row)
        x, weight = ctx.saved_tensors
        comm, seq, dtype = ctx.spec
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = _rows(grad if seq is None else comm.all_gather(grad, seq))
        grad_x = rows.mm(weight).view(x.shape) if needs_x else None
        grad_weight = rows.t().mm(_rows(x)) if needs_weight else None
        # from the gathered gradient: the bias is replicated, so every rank needs the sum over all tokens
        grad_bias = _sum_of_rows(rows, dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None


Fused = Callable[..., Tensor]


def _fused(mapped: Any, function: Any, forward: Forward) -> Fused:
    """One of the public functions below. Without gradients the autograd Function is left out, for its overhead."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec, scale: Tensor | None = None) -> Tensor:
        x = plain(x)
        if scale is not None:
            y: Tensor = mapped(x, weight, bias, spec, partial(quantized.linear, scale=scale))
            return y
        x, weight, bias = autocasted(x, weight, bias, spec[0].device_type)
        apply = function.apply if torch.is_grad_enabled() else forward
        y = (mapped if ops.transformed() else apply)(x, weight, bias, spec)
        return y

    return run


column_linear = _fused(_mapped_column, _Column, _column)
"""``x @ weight.T + bias`` with a weight cut by output features; ``spec``'s dtype is of the input gradient's sum.
``scale``: of a quantized weight."""

row_linear = _fused(_mapped_row, _Row, _row)
"""``(sum over ranks of x @ weight.T) + bias`` with a weight cut by input features; ``spec``'s dtype is the sum's."""
