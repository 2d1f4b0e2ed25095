"""The norm of cut gradients, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.comm import Comm
from ..errors import counted
from ..layers.sharding import Sharding, sharding
from ..layout.slices import Share, narrowed
from ..runtime.context import current
from .parameters import Parameters, unique_parameters

Parts = list[tuple[Tensor, int]]
"""(piece of a gradient, number of ranks in the sum that have it)."""


def _parts(grad: Tensor, shares: Sequence[Share]) -> Parts:
    """``grad`` by the number of ranks that have each entry: one piece, unless blocks differ."""
    if len(shares) <= 1:
        values = grad.coalesce().values() if grad.is_sparse else grad
        return [(values, shares[0].copies if shares else 1)]
    whole = grad.to_dense() if grad.is_sparse else grad
    return [(narrowed(whole, s.start, s.size), s.copies) for s in shares]


def _power_sum(parts: Parts, p: float, zero: Tensor) -> Tensor:
    """Sum of ``|g|^p`` (largest ``|g|`` for infinity) over gradients, each divided by its copies."""
    total = zero
    for grad, copies in parts:
        if grad.numel() == 0:
            continue
        norm = torch.linalg.vector_norm(grad, p, dtype=torch.promote_types(grad.dtype, torch.float32))
        total = torch.maximum(total, norm) if p == float("inf") else total + norm.pow(p) / copies
    return total


class Addend(NamedTuple):
    """One parameter's share of a norm."""

    dtype: torch.dtype  # the parameter's and not its gradient's, which may be missing on some ranks
    comm: Comm | None  # over the ranks that have other entries; None if all have the same
    parts: Parts


def shares_of(parameter: Tensor) -> tuple[Comm | None, tuple[Share, ...]]:
    """Over the ranks that have other entries, and how many have each of this rank's; (None, ()) if all have all."""
    mark = sharding(parameter)
    return (mark.ctx.comm(*mark.axes), mark.shares) if mark is not None and mark.axes else (None, ())


def addend_of(parameter: Tensor) -> Addend:
    grad, (comm, shares) = parameter.grad, shares_of(parameter)
    # part of the sum even if no rank has a gradient
    return Addend(parameter.dtype, comm, [] if grad is None else _parts(grad, shares))


@torch.no_grad()
def norm_of_gradients(parameters: Sequence[Tensor], p: float) -> Tensor:
    """The norm of the full gradient of ``parameters``. Collective."""
    device = parameters[0].device if parameters else None
    if current().reproducible is not None and p != float("inf"):
        return norm_in_order([(q, q.grad) for q in parameters], p, device)
    return norm_of([addend_of(q) for q in parameters], p, device)


@torch.no_grad()
def norm_of(addends: Sequence[Addend], p: float, device: torch.device | None, over: Comm | None = None) -> Tensor:
    """The norm of full gradients, with one all-reduce for each set of axes. ``over``: further ranks, which
    each have other entries of every gradient."""
    wide = reduce(torch.promote_types, (addend.dtype for addend in addends), torch.float32)
    cut: dict[Comm | None, Parts] = defaultdict(list)
    for addend in addends:
        cut[addend.comm] += addend.parts
    zero = torch.zeros((), dtype=wide, device=device)
    total = _power_sum(cut.pop(None, []), p, zero)
    # sorted by axes, for the same order on all ranks: stages have different parameters
    comms = sorted((comm for comm in cut if comm is not None), key=lambda comm: comm.group.axes)
    for comm in comms:
        part = _over(comm, _power_sum(cut[comm], p, zero).to(wide), p)
        total = torch.maximum(total, part) if p == float("inf") else total + part
    if over is not None:
        total = _over(over, total, p)
    return total if p == float("inf") else total.pow(1 / p)


def _over(comm: Comm, part: Tensor, p: float) -> Tensor:
    # one element, not 0-d: backends move tensors with dims
    return comm.all_reduce(part.reshape(1), "max" if p == float("inf") else "sum").squeeze(0)


def checked_norm_type(norm_type: float | str) -> float:
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be a positive number or 'inf', not {norm_type!r}")
    return p


def check_max_norm(max_norm: float) -> None:
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more, not {max_norm}")


@torch.no_grad()
def scale_to(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that a norm of ``norm`` becomes at most ``max_norm``."""
    # 1e-6 as in torch.nn.utils.clip_grad_norm_
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))


@torch.no_grad()
def clip_grad_norm(parameters: Parameters, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scale gradients in place so that the norm of the *full* gradient is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsharded model: cut gradients are summed over their ranks, in one
    all-reduce for each set of axes, and replicated and shared ones count once. ``parameters``: a model, a parameter, or
    any iterable of parameters. ``norm_type``: a positive number, ``float("inf")`` or ``"inf"``.

    Returns the norm before clipping, 0-d, float32 or wider, the same on every rank. Call it after the mean over data
    parallel, which it takes itself of the parameters of a ``Zero1``: of all of them. Collective: all ranks of the
    layouts' axes must call it. Raises ValueError for parameters of another context, for some of a ``Zero1``'s
    and for parameters that torch's own parallelism has sharded.
    """
    p = checked_norm_type(norm_type)
    check_max_norm(max_norm)
    unique = unique_parameters(parameters)
    trained = {q for q in unique if q.requires_grad}
    for optimizer in filter(None, (ref() for ref in reversed(current().steppers))):
        averaged = {q for q in optimizer.averaged if q.requires_grad}
        # by all parameters, so that a stage of which all are frozen takes the same way
        if not optimizer.averaged.isdisjoint(unique):
            if trained != averaged:
                raise ValueError(
                    f"clip_grad_norm of {counted(len(trained), 'parameter')}, and a Zero1 has the gradients of "
                    f"{len(averaged)}, of which each dp rank steps its chunks: pass all of its parameters and "
                    "no others, or tpcore.optimizer_step(optimizer, max_norm=)"
                )
            norm: Tensor = optimizer.clip(max_norm, p)
            return norm
    norm = norm_of_gradients(unique, p)
    scale_to((q.grad for q in unique if q.grad is not None), norm, max_norm)
    return norm


def norm_in_order(gradients: Iterable[tuple[Tensor, Tensor | None]], p: float, device: torch.device | None) -> Tensor:
    """The norm of full gradients, of pairs (parameter, this rank's part or None): of numbers that are the same at every
    degree, one for each whole gradient or block of a sharded one, gathered, sorted and added in a tree, where zeros
    change nothing. Collective."""
    numbers: dict[Comm | None, list[Tensor]] = defaultdict(list)
    wide = torch.float32
    for parameter, grad in gradients:
        mark, wide = sharding(parameter), torch.promote_types(wide, parameter.dtype)
        of = numbers[mark.ctx.comm(*mark.axes) if mark is not None and mark.axes else None]
        for block in () if grad is None else _blocks(grad, mark, current().reproducible or 1):
            in_dtype = torch.promote_types(block.dtype, torch.float32)
            of.append(torch.linalg.vector_norm(block.contiguous(), p, dtype=in_dtype))
    found = []
    for comm in sorted(numbers, key=lambda comm: () if comm is None else comm.group.axes):
        mine = torch.stack([n.to(wide).pow(p) for n in numbers[comm]]) if numbers[comm] else torch.zeros(1, dtype=wide)
        found.append(mine.to(device) if comm is None else _gathered(mine.to(device), comm))
    total = torch.cat(found or [torch.zeros(1, dtype=wide, device=device)]).sort(descending=True).values
    while len(total) > 1:
        total = F.pad(total, (0, len(total) % 2))
        total = total[::2] + total[1::2]
    return total.squeeze(0).pow(1 / p)


def _gathered(mine: Tensor, comm: Comm) -> Tensor:
    """All ranks' numbers, with zeros behind those of a pipeline's stage that has fewer than another."""
    if "pp" in comm.group.axes and comm.eager:
        most = comm.all_reduce(torch.tensor([len(mine)], device=mine.device), "max").item()
        mine = F.pad(mine, (0, int(most) - len(mine)))
    return comm.all_gather(mine, 0)


def _blocks(grad: Tensor, mark: Sharding | None, most: int) -> Iterator[Tensor]:
    """The gradient's blocks that this rank has, of ``most`` along the sharded dim; all of one that is not sharded."""
    grad = grad.to_dense() if grad.is_sparse else grad
    if mark is None or not mark.layout.cuts:
        yield grad
        return
    spec, sizes = mark.layout.spec, mark.ctx.mesh.axes
    ranks = prod(sizes.get(axis, 1) for axis in mark.layout.cuts[0].axes)
    for part in grad.split([block.size // ranks for block in spec.blocks], spec.dim or 0):
        yield from part.chunk(most // ranks, spec.dim or 0)
