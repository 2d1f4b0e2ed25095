"""The norm of gradients that are cut, and clipping by it."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ..boxes import narrowed
from ..comm import Comm
from ..layers.sharding import Sharding, sharding
from .parameters import Parameters, unique_parameters

Parts = list[tuple[Tensor, int]]
"""Pieces of gradients, each held by so many of the ranks that are summed over."""


def _gradient(p: Tensor) -> Tensor | None:
    if p.grad is None or not p.grad.is_sparse:
        return p.grad
    return p.grad.coalesce().values()


def _parts(parameter: Tensor, found: Sharding) -> Parts:
    """The gradient as pieces that equally many ranks hold: one, unless blocks are replicated unlike."""
    grad, shares = parameter.grad, found.shares
    if grad is None:
        return []
    if len(shares) == 1:
        values = _gradient(parameter)
        return [] if values is None else [(values, shares[0].copies)]
    whole = grad.to_dense() if grad.is_sparse else grad
    return [(narrowed(whole, s.start, s.size), s.copies) for s in shares]


def _power_sum(parts: Parts, p: float, zero: Tensor) -> Tensor:
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
    # by the ranks that hold other numbers, and so in one order on all of them: stages hold other parameters
    cut: dict[tuple[str, ...], dict[Comm, Parts]] = defaultdict(lambda: defaultdict(list))
    whole: Parts = []
    wide = torch.float32
    for parameter in parameters:
        # of the parameter and not of its gradient, which not every rank need have
        wide = torch.promote_types(wide, parameter.dtype)
        found, grad = sharding(parameter), _gradient(parameter)
        if found is not None and found.axes:
            # takes part in the sum even where no rank has a gradient
            cut[found.axes][found.ctx.comm(*found.axes)] += _parts(parameter, found)
        elif grad is not None:
            whole.append((grad, 1))
    device = parameters[0].device if parameters else None
    zero = torch.zeros((), dtype=wide, device=device)
    total = _power_sum(whole, p, zero)
    for comm, parts in (item for axes in sorted(cut) for item in cut[axes].items()):
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
    what is replicated or shared counts once. The sum goes over exactly the mesh axes along which ranks hold
    other entries, in one all-reduce for each set of axes. ``parameters``: a model, a parameter, or any
    iterable of them, generators too. ``norm_type``: a positive number, ``float("inf")`` or ``"inf"``.

    Returns the norm before clipping, 0-d, float32 or wider, the same on every rank. Call it after the
    mean over data parallel. Collective: every rank that the layouts name must call it.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be a positive number or 'inf', not {norm_type!r}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more, not {max_norm}")
    unique = unique_parameters(parameters)
    norm = _total_norm(unique, p)
    # 1e-6 as in torch.nn.utils.clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in unique:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
