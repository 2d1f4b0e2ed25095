"""Boxes of a tensor: products of intervals, one for each dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """``size`` entries that start at ``full`` in the full tensor and at ``local`` in a rank's part."""

    full: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]
    copies: int  # how many positions on the layout's axes hold the box


class Share(NamedTuple):
    """A box of every rank's part, padding included. Each of its entries is on ``copies`` positions."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    copies: int


class Region(NamedTuple):
    """A box of ``size`` to copy: from ``src_start`` in the part of rank ``src`` to ``dst_start``."""

    src: int
    src_start: tuple[int, ...]
    dst_start: tuple[int, ...]
    size: tuple[int, ...]

    def rows(self, start: int, end: int) -> Region:
        """The region, clipped to rows ``start`` to ``end`` of the destination and counted from ``start``."""
        at = self.dst_start[0]
        first, last = (min(max(row, start), end) for row in (at, at + self.size[0]))
        return Region(
            self.src,
            (self.src_start[0] + first - at, *self.src_start[1:]),
            (first - start, *self.dst_start[1:]),
            (last - first, *self.size[1:]),
        )


def narrowed(t: Tensor, starts: Sequence[int], size: Sequence[int]) -> Tensor:
    """A view of a box of ``t``."""
    for dim, (start, length) in enumerate(zip(starts, size, strict=True)):
        if length != t.shape[dim]:
            t = t.narrow(dim, start, length)
    return t


def offset(box: Box, at: tuple[int, ...]) -> tuple[int, ...]:
    """The index within a rank's part of the entry at index ``at`` of the full tensor."""
    return tuple(local + a - full for local, a, full in zip(box.local, at, box.full, strict=True))
