"""Sums over ranks that have one order at every degree: a balanced tree over what a fixed number of ranks would add."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .transport import Op, Pending, Transport
from .wrapper import DelegatingTransport


def tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum of neighbours in pairs, of these in pairs, and so on: what a rank adds of its parts, where each has the
    same power of two of them, is a branch of the tree over those of all ranks."""
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


class InOrder(DelegatingTransport):
    """Sums in the tree over the members, by collectives that only move: each member adds a chunk of all, so that a rank
    sends no more bytes than in a ring."""

    def at(self, position: Tensor) -> Transport:
        other = super().at(position)
        other._inner = self._inner.at(position)  # type: ignore[attr-defined]
        return other

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        if op != "sum":  # which any order leaves as it is
            return self._inner.all_reduce(x, op, donate)
        flat = x.reshape(-1)
        padded = F.pad(flat, (0, -len(flat) % self.size)).view(self.size, -1)
        mine = tree(self._inner.all_to_all(padded, 0, 0).unbind())
        return self._inner.all_gather(mine, 0)[: len(flat)].view(x.shape)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        chunks = x.unflatten(dim, (self.size, -1)).movedim(dim, 0)
        return tree(self._inner.all_to_all(chunks, 0, 0).unbind()).contiguous()

    def start_all_reduce(self, x: Tensor, op: Op, donate: bool) -> Pending:
        if op != "sum":
            return self._inner.start_all_reduce(x, op, donate)
        return super().start_all_reduce(x, op, donate)

    def start_permute(self, x: Tensor, to: tuple[int, ...]) -> Pending:
        return self._inner.start_permute(x, to)
