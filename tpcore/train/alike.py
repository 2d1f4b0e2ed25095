"""Gradients of whole parameters, which all ranks of a tp group have alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm.comm import Comm
from ..layers.sharding import sharding
from ..runtime.digests import are_compared, are_read
from .parameters import check_parameters, names_of

_WAVES, _SAMPLE = 4, 1 << 16
_APART, _NOISE = 1e-2, 1e-6
"""How far projections of one gradient on two ranks may be apart, relative to its norm and to the largest one's: a
kernel that adds in any order makes a smaller difference, a sum over other tokens or features a larger one."""


def projections(t: Tensor, sample: int = _SAMPLE) -> Tensor:
    """Of a sample of the entries of ``t``: the norm, whether they differ, and the projections onto some waves."""
    flat = t.detach().reshape(-1)[:: t.numel() // sample | 1]
    flat = flat.float() if flat.itemsize < 4 else flat
    at = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=flat.dtype)
    waves = ((flat * (at * (1 + i)).cos()).sum() for i in range(_WAVES))
    return torch.stack([flat.norm(), (flat != flat[:1]).any(), *waves]).float()


def gathered(projected: Sequence[Tensor], comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """Of each tensor how far it is apart between the ranks of ``comm``, its largest norm, and whether its entries
    differ on one. Collective."""
    device = comm.position.device  # parameters may be on several
    ranks = comm.all_gather(torch.stack([t.to(device) for t in projected])[None], 0)
    waves = ranks[:, :, 2:]
    return (waves[1:] - waves[:1]).abs().amax((0, 2)), ranks[:, :, 0].amax(0), ranks[:, :, 1].amax(0) > 0


def are_other(apart: Tensor, norms: Tensor, noise: float) -> Tensor:
    """Which gradients differ by more than rounding. ``noise``: of their dtypes."""
    return apart > _APART * norms + max(noise, _NOISE) * norms.amax()


def check_whole_gradients(optimizer: Optimizer, comm: Comm) -> None:
    """ValueError on all ranks of ``comm``, in the first steps of an optimizer and in all of a checked run, for its
    parameters that are whole on each rank and whose gradients differ. Collective."""
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    # by what ranks have alike: an object's id may be used again on one of them alone, which then would not wait
    if not are_compared({}, comm, ("gradients", len(parameters))):
        return
    names = names_of(groups)
    check_parameters(parameters, names)
    given = zip(names, parameters, strict=True)
    whole = {name: p for name, p in given if p.requires_grad and p.is_floating_point() and not _axes(p)}
    gradients = {name: p.grad for name, p in whole.items() if p.grad is not None and not p.grad.is_sparse}
    if not whole or not are_read(gradients, comm):
        return
    none = torch.zeros(2 + _WAVES)
    apart, norms, _ = gathered([projections(gradients[n]) if n in gradients else none for n in whole], comm)
    noise = max((torch.finfo(g.dtype).eps for g in gradients.values()), default=_NOISE)
    wrong = are_other(apart, norms, noise).tolist()
    if different := [name for name, is_wrong in zip(whole, wrong, strict=True) if is_wrong]:
        shown = ", ".join(different[:4]) + (f" and {len(different) - 4} more" if len(different) > 4 else "")
        raise ValueError(
            f"the gradients of parameters {shown}, whole on each tp rank, differ between them: ranks have other "
            "batches or draw other random numbers, or a forward computes with a rank's part outside of a layer: with "
            "the weight of a sharded layer, as F.linear(x, embedding.weight), where a tpcore.ColumnParallelLinear with "
            "the same weight is a head; with some of the tokens, where norms are tpcore.RMSNorm or tpcore.LayerNorm "
            "with sequence_parallel=True; or with features that no function of tpcore.comm.mappings copies or sums"
        )


def _axes(p: Tensor) -> tuple[str, ...]:
    mark = sharding(p)
    return () if mark is None else mark.axes
