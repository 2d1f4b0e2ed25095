"""How a tensor is sharded. Layers, checkpoints and clipping all use this module; no other computes cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST_BLOCKS = 4096  # limit for specs read from files: the work grows with the square of the number


def divide(numerator: int, denominator: int, what: str = "") -> int:
    """The quotient, e.g. of heads by ``tp.size``. ValueError, naming ``what``, if there is a remainder."""
    if denominator < 1 or numerator % denominator:
        raise ValueError(f"{what + '=' if what else ''}{numerator} is not divisible by {denominator}")
    return numerator // denominator


def mark_of(t: object) -> Any:
    """The mark of a tensor of which other ranks hold other entries; None for any other."""
    mark = getattr(t, "tpcore_sharding", None)
    return mark if getattr(mark, "axes", ()) else None


class Block(NamedTuple):
    """``Block(size, unit=1, replicate=False)``: a run of ``size`` along the cut dim, cut in whole ``unit``s, head_dim
    say; with ``replicate`` fewer of them than ranks are repeated (GQA), not padded."""

    size: int
    unit: int = 1
    replicate: bool = False


class Piece(NamedTuple):
    """``length`` entries that start at ``full`` in the full tensor and at ``local`` in a shard."""

    full: int
    local: int
    length: int


@dataclass(frozen=True)
class ShardSpec:
    """The cut of one tensor. It names no rank and no world size, so it is valid for any degree.

    ``shape`` is the logical (unsharded, unpadded) shape; ``dim`` is the cut dim, or None if every rank has
    the full tensor. If the ranks do not divide the dim, each block is padded with zeros at its end.

    Law: ``unshard(shards) == full`` for every degree.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    blocks: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(f"cannot cut dim {self.dim} of a tensor of shape {self.shape}")
        if not self.blocks:
            object.__setattr__(self, "blocks", (Block(self.shape[self.dim]),))
        left = self.shape[self.dim]
        for b in self.blocks:
            left -= b.size
            if b.unit < 1 or b.size < 0:
                raise ValueError(f"{b} has no size or no unit that a cut can have")
            if b.size % b.unit:
                raise ValueError(f"{b} is not a whole number of units")
        if left:
            raise ValueError(f"blocks {self.blocks} do not add up to dim {self.dim} of {self.shape}")

    @classmethod
    def strided(cls, shape: tuple[int, ...], dim: int, stride: int = 1) -> ShardSpec:
        """``stride`` equal parts fused along ``dim`` (q|k|v, gate|up), each sharded on its own."""
        if stride < 1 or shape[dim] % stride:
            raise ValueError(f"stride {stride} does not divide size {shape[dim]} of dim {dim} of {shape}")
        return cls(shape, dim, (Block(shape[dim] // stride),) * stride)

    def _chunk(self, block: Block, n: int) -> tuple[int, int]:
        """(padded length of one shard of ``block``, number of ranks that have each shard)."""
        units = -(-block.size // block.unit)
        if block.replicate and 0 < units < n:
            if n % units:
                raise ValueError(f"cannot replicate {units} units over {n} ranks: not divisible")
            return block.unit, n // units
        return -(-units // n) * block.unit, 1

    def pieces(self, rank: int, n: int) -> Iterator[Piece]:
        """The runs of the full tensor in shard ``rank`` of ``n``. Everything else derives from this."""
        full = local = 0
        for block in self.blocks:
            length, copies = self._chunk(block, n)
            start = min(rank // copies * length, block.size)
            yield Piece(full + start, local, min(length, block.size - start))
            full += block.size
            local += length

    def local_shape(self, n: int) -> tuple[int, ...]:
        """Shape of one shard of ``n``, padding included; the same on every rank."""
        if self.dim is None:
            return self.shape
        width = sum(self._chunk(b, n)[0] for b in self.blocks)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    def padded(self, n: int) -> bool:
        """Whether some rank of ``n`` has padding."""
        return any(sum(p.length for p in self.pieces(r, n)) < self._width(n) for r in range(n))

    def block_copies(self, n: int) -> tuple[int, ...]:
        """For each block, how many of ``n`` ranks have each entry of it."""
        return tuple(self._chunk(block, n)[1] for block in self.blocks)

    def copies(self, n: int) -> int:
        """How many of ``n`` ranks have each entry, n if uncut. ValueError if that differs by block."""
        if self.dim is None:
            return n
        copies = {c for c, b in zip(self.block_copies(n), self.blocks, strict=True) if b.size} or {1}
        if len(copies) > 1:
            raise ValueError(f"blocks {self.blocks} are held by {sorted(copies)} of {n} ranks each, not alike")
        return copies.pop()

    def _width(self, n: int) -> int:
        return 0 if self.dim is None else self.local_shape(n)[self.dim]

    def source_index(self, n: int) -> Tensor:
        """int64 ``[n, local]``: the full index of each local position; -1 marks padding."""
        return torch.from_numpy(_source_index(self, n))

    def gathered_index(self, n: int) -> Tensor:
        """int64 ``[full]``: the position of each full index in the concatenation of the n shards."""
        return torch.from_numpy(_gathered_index(self, n))

    def contiguous(self, n: int) -> bool:
        """Whether the concatenation of the n shards equals the full tensor."""
        return len(self.blocks) <= 1 and not self.padded(n) and self.copies(n) == 1

    def shard(self, full: Tensor, rank: int, n: int) -> Tensor:
        """Shard ``rank`` of ``n``, in its own memory. ValueError if ``full`` has not the full shape."""
        self._check([full])
        if self.dim is None:
            return full.clone()
        out = full.new_zeros(self.local_shape(n))
        for piece in self.pieces(rank, n):
            source = full.narrow(self.dim, piece.full, piece.length)
            out.narrow(self.dim, piece.local, piece.length).copy_(source)
        return out

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor, in its own memory. ValueError if a shard has another shape than ``local_shape``."""
        self._check(shards)
        if self.dim is None:
            return shards[0].clone()
        out = shards[0].new_empty(self.shape)
        for rank in reversed(range(len(shards))):  # of copies the first rank's stays
            for piece in self.pieces(rank, len(shards)):
                source = shards[rank].narrow(self.dim, piece.local, piece.length)
                out.narrow(self.dim, piece.full, piece.length).copy_(source)
        return out

    def _check(self, shards: Sequence[Tensor]) -> None:
        n, shape = len(shards), self.local_shape(len(shards))
        for shard in shards:
            if tuple(shard.shape) != shape:
                raise ValueError(f"a shard of {n} of {self} has shape {tuple(shard.shape)}, not {shape}")

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dim": self.dim, "blocks": [list(b) for b in self.blocks]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ShardSpec:
        if len(data["blocks"]) > _MOST_BLOCKS:
            raise ValueError(f"{len(data['blocks'])} blocks: a tensor has {_MOST_BLOCKS} at most")
        blocks = tuple([Block(int(size), int(unit), bool(rep)) for size, unit, rep in data["blocks"]])
        return cls(tuple(map(int, data["shape"])), data["dim"], blocks)

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        if self.dim is None:
            return f"{size} replicated"
        blocks = "" if len(self.blocks) == 1 else f" in {len(self.blocks)} blocks"
        return f"{size} sharded on dim {self.dim}{blocks}"


# The layers of a model have few cuts, and share their tables. These are arrays: a tensor made under inference_mode or
# while tracing cannot be used outside of it.
@lru_cache(256)
def _source_index(spec: ShardSpec, n: int) -> NDArray[np.int64]:
    table = np.full((n, spec._width(n)), -1, dtype=np.int64)
    for rank in range(n):
        for p in spec.pieces(rank, n):
            table[rank, p.local : p.local + p.length] = np.arange(p.full, p.full + p.length)
    return table


@lru_cache(256)
def _gathered_index(spec: ShardSpec, n: int) -> NDArray[np.int64]:
    table, width = _source_index(spec, n), spec._width(n)
    out = np.empty(0 if spec.dim is None else spec.shape[spec.dim], dtype=np.int64)
    for rank in reversed(range(n)):  # replicated blocks have an index several times; the first rank's stays
        filled = table[rank] >= 0
        out[table[rank][filled]] = rank * width + np.arange(width)[filled]
    return out
