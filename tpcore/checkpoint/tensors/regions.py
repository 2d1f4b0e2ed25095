"""From shards cut one way to a shard cut another way: which region of which shard goes where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...shard import Piece, ShardSpec


class Region(NamedTuple):
    """A box of ``size``, at ``src_start`` in shard ``src`` and at ``dst_start`` in the wanted shard."""

    src: int
    src_start: tuple[int, ...]
    dst_start: tuple[int, ...]
    size: tuple[int, ...]

    def rows(self, start: int, end: int) -> Region:
        """What lies in these rows of the wanted shard, with them as the shard."""
        at = self.dst_start[0]
        first, last = (min(max(row, start), end) for row in (at, at + self.size[0]))
        return Region(
            self.src,
            (self.src_start[0] + first - at, *self.src_start[1:]),
            (first - start, *self.dst_start[1:]),
            (last - first, *self.size[1:]),
        )


_ALL = Piece(0, 0, 0)  # of a tensor that is not cut


def _held(spec: ShardSpec, m: int) -> Iterator[tuple[int, Piece]]:
    """Each entry of the full tensor once, in order, with the first of ``m`` shards that holds it."""
    if spec.dim is None:
        yield 0, _ALL
    filled = 0
    for piece, src in sorted((p, shard) for shard in range(m) for p in spec.pieces(shard, m)):
        start, end = max(piece.full, filled), piece.full + piece.length
        if start < end:
            yield src, Piece(start, piece.local + start - piece.full, end - start)
            filled = end


def regions(have: ShardSpec, m: int, want: ShardSpec, rank: int, n: int) -> Iterator[Region]:
    """What to copy, from ``m`` shards cut as ``have``, to build shard ``rank`` of ``n`` cut as ``want``.

    Both are cuts of one logical tensor, along the same dim or not. What no region covers is padding.
    Law: the shards ``have.shard(full, i, m)`` give ``want.shard(full, rank, n)``.
    """
    if have.shape != want.shape:
        raise ValueError(f"{have} and {want} are not cuts of one tensor")
    for src, held in _held(have, m):
        for wanted in want.pieces(rank, n) if want.dim is not None else [_ALL]:
            region = _common(src, have, held, want, wanted)
            if 0 not in region.size:
                yield region


def _common(src: int, have: ShardSpec, held: Piece, want: ShardSpec, wanted: Piece) -> Region:
    """What a piece of a stored shard and a piece of the wanted one have in common."""
    src_start, dst_start, size = [0] * len(have.shape), [0] * len(have.shape), list(have.shape)
    if have.dim is not None:
        src_start[have.dim], dst_start[have.dim], size[have.dim] = held.local, held.full, held.length
    if want.dim is not None and want.dim != have.dim:
        src_start[want.dim], dst_start[want.dim], size[want.dim] = wanted.full, wanted.local, wanted.length
    elif want.dim is not None:
        lo = max(held.full, wanted.full)
        hi = max(lo, min(held.full + held.length, wanted.full + wanted.length))
        src_start[want.dim], dst_start[want.dim] = (
            held.local + lo - held.full,
            wanted.local + lo - wanted.full,
        )
        size[want.dim] = hi - lo
    return Region(src, tuple(src_start), tuple(dst_start), tuple(size))
