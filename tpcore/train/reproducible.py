"""Norms and sums of gradients that have the same bits at every degree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.comm import Comm
from ..layers.sharding import Sharding, sharding
from ..runtime.context import current


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
