"""Functions for loops that handle gradients themselves: sums and means in place, norms, clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tpcore.comm.comm import Comm
from tpcore.layout.mesh import DATA
from tpcore.runtime.context import current
from tpcore.train import clip
from tpcore.train.data_parallel import BUCKET, buckets
from tpcore.train.parameters import Parameters, unique_parameters
from tpcore.train.zero import Zero1


@torch.no_grad()
def _sum_in_place(grads: Iterable[Tensor], comm: Comm, divide_by: int = 1) -> None:
    """Replace each gradient by the sum over the group, several in one message. Collective over it."""
    if comm.size == 1:
        return
    for bucket in buckets(grads, lambda g: g.dtype, lambda g: g.nbytes, BUCKET):
        flat = torch.cat([g.reshape(-1) for g in bucket]).div_(divide_by)
        total = comm.all_reduce(flat, donate=True)
        for grad, part in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))


def bucket_allreduce_gradients(grads_list: Iterable[Tensor], reduce_over_ep_group: bool = False) -> None:
    """Replace each of these gradients, the same on every dp rank, by its mean over dp, in place.

    With experts over ep, whose ranks have other examples, it takes two calls: one for all gradients, which leaves out
    ep, for there are other experts, and backward has taken the mean of theirs; and one with
    ``reduce_over_ep_group=True`` for those of all but experts. Without ep the second does nothing."""
    ctx = current()
    axes = ("ep",) if reduce_over_ep_group else tuple(axis for axis in DATA if axis != "ep")
    comm = ctx.comm(*ctx.mesh.present(axes))
    _sum_in_place(list(grads_list), comm, comm.size)


def allreduce_sequence_parallel_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sum over tp, in place, the gradients of parameters that carry ``sequence_parallel_enabled``: those of a script's
    own norms. Backward has summed those of tpcore's layers, which carry no such mark."""
    inner = getattr(optimizer, "optimizer", optimizer)
    marked = [p for group in inner.param_groups for p in group["params"] if getattr(p, "sequence_parallel_enabled", 0)]
    gradients = [inner.gradient_of(p) if isinstance(inner, Zero1) else p.grad for p in marked]
    _sum_in_place([grad for grad in gradients if grad is not None], current().comm("tp"))


def _check_not_zero1(zero1_optimizer: bool, zero1_optimizer_groups: Any) -> None:
    if zero1_optimizer or zero1_optimizer_groups is not None:
        raise ValueError(
            "zero1_optimizer and zero1_optimizer_groups: each dp rank has a part of the gradient, which "
            "tpcore.Zero1 knows itself: use its norm(), or tpcore.optimizer_step(optimizer, max_norm=)"
        )


def get_grad_norm(
    parameters: Parameters,
    norm_type: float | str = 2.0,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Any = None,
    force_spmd: bool = True,
) -> Tensor:
    """The norm of the full gradient in ``.grad``, without clipping: with ZeRO-1 that is this dp rank's own, until the
    step takes the mean. Collective. ``force_spmd`` is about programs, which are the same on all ranks in any case."""
    _check_not_zero1(zero1_optimizer, zero1_optimizer_groups)
    p = clip.checked_norm_type(norm_type)
    unique = unique_parameters(parameters)
    device = unique[0].device if unique else None
    return clip.norm_of([clip.addend_of(q) for q in unique], p, device)


def clip_grads_with_norm(parameters: Parameters, total_norm: Tensor, max_norm: float) -> Tensor:
    """Scale gradients in place so that a norm of ``total_norm``, which is returned, becomes at most ``max_norm``."""
    clip.check_max_norm(max_norm)
    grads = (p.grad for p in unique_parameters(parameters) if p.grad is not None)
    clip.scale_to(grads, total_norm, max_norm)
    return total_norm


def clip_grad_norm(
    parameters: Parameters,
    max_norm: float,
    norm_type: float | str = 2.0,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Any = None,
    force_spmd: bool = True,
) -> Tensor:
    """``tpcore.clip_grad_norm``, with the arguments that were published for other optimizers."""
    _check_not_zero1(zero1_optimizer, zero1_optimizer_groups)
    return clip.clip_grad_norm(parameters, max_norm, norm_type)
