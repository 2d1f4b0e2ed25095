"""The mean of gradients over data parallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..runtime.context import current
from .buckets import buckets
from .parameters import Parameters, unique_parameters

BUCKET = 25 * 2**20
"""Bytes of gradients in one all-reduce: DDP's default, enough to hide latency."""


def present_anywhere(has: Sequence[bool], dp: Comm, device: torch.device) -> list[bool]:
    """For each gradient, whether any dp rank has it: not every rank's batch uses every parameter."""
    # a lazy backend runs one program on all ranks, so they cannot differ
    if not has or dp.size == 1 or not dp.eager:
        return list(has)
    anywhere = dp.all_reduce(torch.tensor(has, dtype=torch.int64, device=device), "max")
    # on meta a step is recorded and not run
    return list(has) if anywhere.is_meta else [bool(n) for n in anywhere.tolist()]


def _match_presence(parameters: list[Tensor], dp: Comm) -> None:
    """Give a zero gradient to parameters that have a gradient on another dp rank only."""
    if not parameters:
        return
    anywhere = present_anywhere([p.grad is not None for p in parameters], dp, parameters[0].device)
    for p, somewhere in zip(parameters, anywhere, strict=True):
        if somewhere and p.grad is None:
            p.grad = torch.zeros_like(p)


@torch.no_grad()
def reduce_gradients(parameters: Parameters) -> None:
    """Replace every gradient by its mean over the data-parallel group, in buckets. Collective over dp and cp.

    cp ranks count like dp ranks: each has other tokens and the loss of the whole batch, so that a mean over
    all of them is the gradient whether a model cuts its tokens or not.

    A parameter that has no gradient on any dp rank keeps none. Raises ValueError for parameters of another
    context and for parameters that torch's own parallelism has cut.
    """
    unique = [p for p in unique_parameters(parameters) if p.requires_grad]
    dp = current().data
    if dp.size == 1:
        return
    _match_presence(unique, dp)
    grads = []
    for p in unique:
        if p.grad is not None:
            if p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # the ranks' sparse gradients have different rows
            grads.append(p.grad)
    for bucket in buckets(grads, lambda g: g.dtype, lambda g: g.nbytes, BUCKET):
        flat = torch.cat([g.reshape(-1) for g in bucket]).div_(dp.size)
        total = dp.all_reduce(flat, donate=True)
        for grad, part in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
