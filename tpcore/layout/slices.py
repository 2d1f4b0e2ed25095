"""Boxes of a tensor: products of intervals, one for each dim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

    def within(self, start: Sequence[int], size: Sequence[int]) -> Region:
        """The region within this box of the wanted part, with that box as the part. It may be empty."""
        box = list(zip(self.dst_start, self.size, start, size, strict=True))
        ends = [tuple(min(max(n, s), s + k) for n in (at, at + m)) for at, m, s, k in box]
        first = [begin for begin, _ in ends]
        return Region(
            self.src,
            tuple(a + f - d for a, f, d in zip(self.src_start, first, self.dst_start, strict=True)),
            tuple(f - s for f, s in zip(first, start, strict=True)),
            tuple(last - begin for begin, last in ends),
        )


Slab = tuple[tuple[int, ...], tuple[int, ...]]
"""A box by its start and its size."""


def slabs(shape: Sequence[int], start: int, stop: int) -> Iterator[Slab]:
    """The entries from ``start`` up to ``stop`` of a tensor, numbered row by row, as a few boxes in that order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    whole = range(-(-start // row), stop // row)  # rows
    if not whole:  # one row's end and the next one's start, or the inside of a row
        for at in range(start // row, -(-stop // row)):
            yield from _in_row(shape, at, start, stop)
        return
    yield from _in_row(shape, whole.start - 1, start, whole.start * row)
    yield (whole.start, *(0 for _ in shape[1:])), (len(whole), *shape[1:])
    yield from _in_row(shape, whole.stop, whole.stop * row, stop)


def _in_row(shape: Sequence[int], at: int, start: int, stop: int) -> Iterator[Slab]:
    row = math.prod(shape[1:])
    for begin, size in slabs(shape[1:], max(start - at * row, 0), min(stop - at * row, row)):
        yield (at, *begin), (1, *size)


def narrowed(t: Tensor, starts: Sequence[int], size: Sequence[int]) -> Tensor:
    """A view of a box of ``t``."""
    for dim, (start, length) in enumerate(zip(starts, size, strict=True)):
        if length != t.shape[dim]:
            t = t.narrow(dim, start, length)
    return t


def offset(box: Box, at: tuple[int, ...]) -> tuple[int, ...]:
    """The index within a rank's part of the entry at index ``at`` of the full tensor."""
    return tuple(local + a - full for local, a, full in zip(box.local, at, box.full, strict=True))
