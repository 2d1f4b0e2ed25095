"""A matmul and its collective as one autograd step, so that the two can overlap and share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import ops
from ..comm import Comm


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _column(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    comm: Comm,
    seq: int | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return F.linear(x if seq is None else comm.all_gather(x, seq), weight, bias)


class _Column(torch.autograd.Function):
    """Forward without communication; backward overlaps the input gradient's sum with the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        comm: Comm,
        seq: int | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = comm, seq, dtype
        return _column(x, weight, bias, comm, seq)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        comm, seq, dtype = ctx.args
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        wait: Callable[[], Tensor] | None = None
        if needs_x:
            partial = grad @ weight
            wide = ops.sum_dtype(partial, dtype)
            if seq is None:
                wait = comm.start_all_reduce(partial.to(wide), donate=True)
            else:
                grad_x = comm.reduce_scatter(partial.to(wide), seq).to(x.dtype)
        if needs_weight:
            # gathered again rather than kept: sequence parallelism is there to save that memory
            full = x if seq is None else comm.all_gather(x, seq)
            grad_weight = _rows(grad).t() @ _rows(full)
        if needs_bias:
            grad_bias = _rows(grad).sum(0)
        if wait is not None:
            grad_x = wait().to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _row(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: Comm, seq: int | None, dtype: torch.dtype | None
) -> Tensor:
    y = F.linear(x, weight)
    wide = y.to(ops.sum_dtype(y, dtype))
    if seq is None:
        out = comm.all_reduce(wide, donate=True).to(y.dtype)
    else:
        out = comm.reduce_scatter(wide, seq).to(y.dtype)
    return out if bias is None else out.add_(bias)


class _Row(torch.autograd.Function):
    """Forward sums over the ranks; backward needs no communication, or a gather along the sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        comm: Comm,
        seq: int | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = comm, seq
        return _row(x, weight, bias, comm, seq, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        comm, seq = ctx.args
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if seq is not None:
            grad = comm.all_gather(grad, seq)
        grad_x = grad @ weight if needs_x else None
        grad_weight = _rows(grad).t() @ _rows(x) if needs_weight else None
        # of the gathered gradient: the bias is replicated, so every rank needs the sum over all tokens
        grad_bias = _rows(grad).sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _call(
    fn: Callable[..., Tensor],
    function: type[torch.autograd.Function],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *args: Any,
) -> Tensor:
    """Through autograd where a gradient can be asked for, plainly where not (that saves its overhead)."""
    if torch.is_autocast_enabled(x.device.type):
        to = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(to), weight.to(to), None if bias is None else bias.to(to)
    if torch.is_grad_enabled():
        y: Tensor = function.apply(x, weight, bias, *args)
        return y
    return fn(x, weight, bias, *args)


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: Comm, sequence_dim: int | None, dtype: torch.dtype
) -> Tensor:
    """``x @ weight.T + bias`` of a weight cut by output features; ``dtype`` sums the input gradient."""
    return _call(_column, _Column, x, weight, bias, comm, sequence_dim, dtype)


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: Comm, sequence_dim: int | None, dtype: torch.dtype
) -> Tensor:
    """``sum over ranks of x @ weight.T, + bias`` of a weight cut by input features; ``dtype`` sums it."""
    return _call(_row, _Row, x, weight, bias, comm, sequence_dim, dtype)
