"""Gradients of cut parameters: their norm, clipping, the mean over data parallel, and the optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import overload

import torch
from torch import Tensor, nn

from .comm import Comm
from .context import current
from .module import sharding

Parameters = nn.Module | Tensor | Iterable[Tensor]

BUCKET = 25 * 2**20
"""Bytes of gradients that one all-reduce carries: DDP's default, enough to hide latency."""


def _unique(parameters: Parameters) -> list[Tensor]:
    """Every parameter once, tied ones included; generators may be given."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    return list({id(p): p for p in parameters}.values())


def _gradient(p: Tensor) -> Tensor | None:
    if p.grad is None or not p.grad.is_sparse:
        return p.grad
    return p.grad.coalesce().values()


def _power_sum(parts: list[tuple[Tensor, int]], p: float, zero: Tensor) -> Tensor:
    """Sum of ``|g|^p`` (largest ``|g|`` for infinity) over gradients, each held by ``copies`` ranks."""
    total = zero
    for grad, copies in parts:
        if grad.numel() == 0:
            continue
        norm = torch.linalg.vector_norm(grad, p, dtype=torch.promote_types(grad.dtype, torch.float32))
        total = torch.maximum(total, norm) if p == float("inf") else total + norm.pow(p) / copies
    return total


@torch.no_grad()
def _total_norm(parameters: list[Tensor], p: float) -> Tensor:
    cut: dict[Comm, list[tuple[Tensor, int]]] = defaultdict(list)
    whole: list[tuple[Tensor, int]] = []
    wide = torch.float32
    for parameter in parameters:
        # of the parameter and not of its gradient, which not every rank need have
        wide = torch.promote_types(wide, parameter.dtype)
        found, grad = sharding(parameter), _gradient(parameter)
        is_cut = found is not None and found.spec.dim is not None and found.comm.size > 1
        if is_cut and found is not None:
            cut[found.comm]  # takes part in the sum even where no rank has a gradient
        if grad is None:
            continue
        if is_cut and found is not None:
            cut[found.comm].append((grad, found.spec.copies(found.comm.size)))
        else:
            whole.append((grad, 1))
    device = parameters[0].device if parameters else None
    zero = torch.zeros((), dtype=wide, device=device)
    total = _power_sum(whole, p, zero)
    for comm, parts in cut.items():
        # one element, not 0-d: backends move tensors with dims
        part = _power_sum(parts, p, zero).to(wide).reshape(1)
        if p == float("inf"):
            total = torch.maximum(total, comm.all_reduce(part, "max").squeeze(0))
        else:
            total = total + comm.all_reduce(part).squeeze(0)
    return total if p == float("inf") else total.pow(1 / p)


@torch.no_grad()
def clip_grad_norm(parameters: Parameters, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scale gradients in place so that the norm of the *full* gradient is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsharded model: what is cut is summed over its ranks,
    what is replicated or shared counts once. ``parameters``: a model, a parameter, or any iterable of
    them, generators too. ``norm_type``: a positive number, ``float("inf")`` or ``"inf"``.

    Returns the norm before clipping, 0-d, float32 or wider, the same on every rank. Call it after the
    mean over data parallel. Collective: every rank of the tp group must call it.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be a positive number or 'inf', not {norm_type!r}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more, not {max_norm}")
    unique = _unique(parameters)
    norm = _total_norm(unique, p)
    # 1e-6 as in torch.nn.utils.clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in unique:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype, in order, up to BUCKET bytes together."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        nbytes = grad.numel() * grad.element_size()
        if bucket and size + nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += nbytes
    if bucket:
        yield bucket


def _match_presence(parameters: list[Tensor], dp: Comm) -> None:
    """Give zeros to a parameter that got a gradient on another dp rank only."""
    if not parameters or not dp.eager:  # a lazy backend runs one program on all ranks: they cannot differ
        return
    has = torch.tensor(
        [p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device
    )
    anywhere = dp.all_reduce(has, "max")
    if anywhere.is_meta:  # a step that is recorded and not run
        return
    for p, somewhere in zip(parameters, anywhere.tolist(), strict=True):
        if somewhere and p.grad is None:
            p.grad = torch.zeros_like(p)


@torch.no_grad()
def reduce_gradients(parameters: Parameters) -> None:
    """Replace every gradient by its mean over the data-parallel group, in buckets.

    Collective over dp. A parameter without gradient on all dp ranks keeps none.
    """
    dp = current().comm("dp")
    if dp.size == 1:
        return
    unique = [p for p in _unique(parameters) if p.requires_grad]
    _match_presence(unique, dp)
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for p in unique:
        if p.grad is not None:
            if p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # ranks hold different rows
            by_dtype[p.grad.dtype].append(p.grad)
    for grads in by_dtype.values():
        for bucket in _buckets(grads):
            flat = torch.cat([g.reshape(-1) for g in bucket]).div_(dp.size)
            total = dp.all_reduce(flat, donate=True)
            for grad, part in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))


@overload
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: None = None) -> None: ...
@overload
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: float) -> Tensor: ...
@overload
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: float | None) -> Tensor | None: ...
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> Tensor | None:
    """Mean of the gradients over dp, clipping if ``max_norm`` is given, the step, the backend's end of step.

    The same on every backend. Returns the gradient norm before clipping, or None without ``max_norm``.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    reduce_gradients(parameters)
    norm = None if max_norm is None else clip_grad_norm(parameters, max_norm)
    optimizer.step()
    current().backend.mark_step()
    return norm
