"""Cuts tensors into pieces that fit a buffer, and sums the parts of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Fold = Callable[..., Tensor]
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a tensor that fits a buffer."""

    at: tuple[slice, slice]
    """The piece's rows and columns."""
    every: list[Tensor]
    """Each rank's buffer, in the shape of the piece."""
    meet: Callable[[], None]
    """Call it when this rank's buffer is filled; it returns when every rank's is."""


def folded(parts: list[Tensor], fold: Fold, out: Tensor | None = None) -> Tensor:
    """The parts combined in rank order, into ``out``. Half precision is summed in float32, rounded once."""
    if len(parts) > 2 and parts[0].dtype in _HALF and fold is torch.add:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        return total.to(parts[0].dtype) if out is None else out.copy_(total)
    total = fold(parts[0], parts[1], out=out)
    for part in parts[2:]:
        fold(total, part, out=total)
    return total


def tiles(rows: int, columns: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of a matrix of at most ``most`` elements, whole rows if they fit. An empty matrix has one."""
    wide = max(1, min(columns, most))
    high = max(1, most // wide)
    for r in range(0, max(1, rows), high):
        for c in range(0, max(1, columns), wide):
            yield slice(r, min(r + high, rows)), slice(c, min(c + wide, columns))
