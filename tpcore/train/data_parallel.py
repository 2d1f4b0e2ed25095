"""The mean of gradients over data parallel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from ..comm import Comm
from ..context import current
from .parameters import Parameters, unique_parameters

BUCKET = 25 * 2**20
"""Bytes of gradients that one all-reduce carries: DDP's default, enough to hide latency."""


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
        [p.grad is not None for p in parameters], dtype=torch.int64, device=parameters[0].device
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
    unique = [p for p in unique_parameters(parameters) if p.requires_grad]
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
