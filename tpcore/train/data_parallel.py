"""The mean of gradients over data parallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..runtime.context import current
from .buckets import buckets
from .parameters import Parameters, data_comm, unique_parameters

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
    """Replace every gradient by its mean over the data-parallel group, in buckets. Collective over dp, ep and cp.

    cp ranks count like dp ranks: each has other tokens and the loss of the whole batch, so that a mean over
    all of them is the gradient whether a model cuts its tokens or not. The gradient of an expert is the sum over
    the examples of all ep ranks already: it is summed over dp and cp, and divided by the number of all.

    A parameter that has no gradient on any dp rank keeps none. Raises ValueError for parameters of another
    context and for parameters that torch's own parallelism has cut.
    """
    unique = [p for p in unique_parameters(parameters) if p.requires_grad]
    batches = current().data.size
    if batches == 1:
        return
    by_comm: dict[Comm, list[Tensor]] = {}
    for p in unique:
        by_comm.setdefault(data_comm(p), []).append(p)
    for comm in sorted(by_comm, key=lambda comm: comm.group.axes):  # in the same order on all ranks
        _sum(by_comm[comm], comm, batches)


def _sum(parameters: list[Tensor], dp: Comm, batches: int) -> None:
    """Replace the gradients by their sums over ``dp``, divided by ``batches``."""
    _match_presence(parameters, dp)
    grads = []
    for p in parameters:
        if p.grad is not None:
            if p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # the ranks' sparse gradients have different rows
            grads.append(p.grad)
    for bucket in buckets(grads, lambda g: g.dtype, lambda g: g.nbytes, BUCKET):
        flat = torch.cat([g.reshape(-1) for g in bucket]).div_(batches)
        total = flat if dp.size == 1 else dp.all_reduce(flat, donate=True)
        for grad, part in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
