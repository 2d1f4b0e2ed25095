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
    copies: int  # how many positions on the layout's axes hold it


class Share(NamedTuple):
    """A box of every rank's part, padding included, whose entries are held by ``copies`` positions each."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    copies: int


class Region(NamedTuple):
    """A box of ``size``, ``src_start`` in the part of rank ``src``, at ``dst_start`` in the wanted part."""

    src: int
    src_start: tuple[int, ...]
    dst_start: tuple[int, ...]
    size: tuple[int, ...]

    def rows(self, start: int, end: int) -> Region:
        """The region within these rows of the wanted part, with those rows as the part."""
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
    """Where in the part the entry ``at`` of the full tensor lies."""
    return tuple(local + a - full for local, a, full in zip(box.local, at, box.full, strict=True))
