"""Inverse of optimum-neuron's transformations of weights: fused linears and reordered heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...errors import CheckpointError

Shards = Mapping[str, Sequence[Tensor]]
"""The shards of all ranks, by name."""


class Original(NamedTuple):
    """A tensor of the original model, in equal pieces along ``dim``, in order."""

    name: str
    dim: int
    pieces: list[Tensor]


@dataclass(frozen=True)
class Fused:
    """Linears that follow each other in each rank's shard. ``sizes``: their unsharded sizes along ``dim``."""

    fused: str
    names: Sequence[str]
    dim: int
    sizes: Sequence[int]

    def originals(self, shards: Shards) -> Iterator[Original]:
        tensors, at = shards[self.fused], 0
        for name, size in zip(self.names, self.sizes, strict=True):
            length = size // len(tensors)
            yield Original(name, self.dim, [t.narrow(self.dim, at, length) for t in tensors])
            at += length

    def used(self) -> list[str]:
        return [self.fused]


@dataclass(frozen=True)
class Attention:
    """q, k, v and the output projection of grouped-query attention with ``copies`` of each kv head.

    The copies of kv heads ``a b`` are in the order ``a b a b`` over the ranks. Query heads are reordered so
    that each is on a rank with a copy of its kv head, and the output projection's columns likewise.
    """

    stored: Mapping[str, str]  # names in the shards by "q", "k" and "v", or by "qkv" if fused
    names: Mapping[str, str]  # original names by "q", "k" and "v"
    output: str | None  # cut along dim 1
    q_heads: int
    kv_heads: int
    copies: int

    def originals(self, shards: Shards) -> Iterator[Original]:
        q, k, v = self._parts(shards)
        order = self._order()
        yield Original(self.names["q"], 0, _sorted(q, order, 0))
        first = list(range(self.kv_heads)) * self.copies
        for name, tensors in (("k", k), ("v", v)):
            yield Original(self.names[name], 0, _sorted(tensors, first, 0)[: self.kv_heads])
        if self.output is not None:
            yield Original(self.output, 1, _sorted(shards[self.output], order, 1))

    def _parts(self, shards: Shards) -> list[Sequence[Tensor]]:
        if "qkv" not in self.stored:
            return [shards[self.stored[name]] for name in "qkv"]
        fused = shards[self.stored["qkv"]]
        heads = self.q_heads + 2 * self.kv_heads * self.copies
        size = fused[0].shape[0] * len(fused) // heads
        q, kv = (size * n // len(fused) for n in (self.q_heads, self.kv_heads * self.copies))
        return [[t.narrow(0, at, length) for t in fused] for at, length in ((0, q), (q, kv), (q + kv, kv))]

    def _order(self) -> list[int]:
        """The query head at each position, over all ranks."""
        group, each = self.q_heads // self.kv_heads, self.q_heads // (self.kv_heads * self.copies)
        return [
            kv * group + copy * each + i
            for copy in range(self.copies)
            for kv in range(self.kv_heads)
            for i in range(each)
        ]

    def used(self) -> list[str]:
        return [*self.stored.values(), *([] if self.output is None else [self.output])]


def _sorted(tensors: Sequence[Tensor], order: Sequence[int], dim: int) -> list[Tensor]:
    """Single heads in order, then further copies. Position ``i`` over all ranks has head ``order[i]``."""
    count = len(order) // len(tensors)
    heads = [head for t in tensors for head in t.chunk(count, dim)]
    if len(heads) != len(order):
        raise CheckpointError(f"shards of shape {tuple(tensors[0].shape)} are not of {count} heads each")
    places = sorted(range(len(order)), key=lambda place: (place >= len(set(order)), order[place]))
    return [heads[place] for place in places]
