"""Sequences of which each rank holds some of the tokens: which ones, and which keys a query sees.

Queries, keys and values are ``[batch, heads, tokens, head_dim]``, with this rank's tokens; key heads may be
fewer than query heads. What a query sees is a function of places, so that no mask is an input.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..comm import mappings as ops
from ..comm.comm import Comm
from .fused import enter


@dataclass(frozen=True)
class TokenOrder:
    """Which tokens a rank holds: chunk i of n, or with ``zigzag`` chunks i and 2n-1-i of 2n.

    With zig-zag all ranks have equal work under a causal mask. Ranks pick their tokens by the tensor
    ``position``: one program for all.
    """

    comm: Comm
    zigzag: bool = False

    @property
    def chunks(self) -> int:
        """Of a rank."""
        return 2 if self.zigzag else 1

    def _chunks(self) -> Tensor:
        """``[ranks, chunks of one]``, on the device."""
        n, device = self.comm.size, self.comm.position.device
        first = torch.arange(n, device=device)
        return torch.stack([first, 2 * n - 1 - first], 1) if self.zigzag else first[:, None]

    def places(self, length: int, position: Tensor | None = None) -> Tensor:
        """The places in the whole sequence of ``length`` tokens of the rank at ``position``, default: this one."""
        chunks = self._chunks()
        size = length // chunks.numel()
        at = chunks.index_select(0, self.comm.position if position is None else position).reshape(-1, 1)
        return (at * size + torch.arange(size, device=at.device)).reshape(-1)

    def all_places(self, length: int) -> Tensor:
        """The places of all ranks' tokens, in rank order."""
        return self.places(length, torch.arange(self.comm.size, device=self.comm.position.device))

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of ``x``, which every rank has whole. ValueError if they cannot be dealt evenly."""
        n = self.comm.size * self.chunks
        if x.shape[dim] % n:
            raise ValueError(
                f"context parallelism over {self.comm.size} ranks cannot deal {x.shape[dim]} tokens evenly: pad the "
                f"batch to a multiple of {n}, {-(-x.shape[dim] // n) * n} for instance"
            )
        return x.index_select(dim, self.places(x.shape[dim]).to(x.device))

    def whole(self, x: Tensor, dim: int = 1) -> Tensor:
        """All ranks' tokens, in the order of the sequence. Backward sums the gradients of the ranks' copies."""
        return self.sorted(ops.all_gather(x, self.comm, dim), dim)

    def sorted(self, x: Tensor, dim: int = 1) -> Tensor:
        """All tokens in rank order -> in that of the sequence."""
        return x.index_select(dim, self.all_places(x.shape[dim]).argsort()) if self.zigzag else x

    def dealt(self, x: Tensor, dim: int = 1) -> Tensor:
        """All tokens in the order of the sequence -> in rank order."""
        return x.index_select(dim, self.all_places(x.shape[dim])) if self.zigzag else x


_MARK = (1, 1)
"""Dims of activations between their tokens and their features that say that each rank has some of the tokens."""


@dataclass(eq=False)
class TokenRegion:
    """A block before and after which each rank of ``comm`` may have a chunk of the tokens, along dim 1, if ``comm``
    divides their number. The form of the hidden states says so, ``[batch, chunk, 1, 1, features]``, and what is
    recomputed in backward starts from the same tensor: forwards may come in any order. The block's layers share it."""

    comm: Comm
    active: bool = False
    """Whether it has some in the call under way. What is called or recomputed outside of one has all."""

    def __deepcopy__(self, memo: object) -> TokenRegion:
        return self  # what it says of a call ends with the call

    def is_active(self) -> bool:
        return self.active

    def divides(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[1] % (self.comm.size * (self.comm.blocks or 1)) == 0

    def enter(self, x: Tensor) -> Tensor:
        """This rank's chunk of whole tokens, in its form."""
        return self.marked(self.chunk(x))

    def leave(self, x: Tensor) -> Tensor:
        """What ``enter`` makes -> whole tokens."""
        return self.whole(self.bare(x)) if self.is_marked(x) else x

    def chunk(self, x: Tensor) -> Tensor:
        return ops.scatter(x, self.comm, 1)

    def whole(self, x: Tensor) -> Tensor:
        return ops.gather(x, self.comm, 1)

    @staticmethod
    def is_marked(x: Tensor, block: str = "what follows the last block") -> bool:
        """Whether each rank has some of the tokens. ValueError for what other tensors have made of such states."""
        if x.ndim == 5 and x.shape[2:4] != _MARK:
            raise ValueError(
                f"{block} gets hidden states of shape {tuple(x.shape)}: the model around it works on them between its "
                "blocks, where each rank has some of the tokens: leave sequence_parallel out"
            )
        return x.ndim == 5

    @staticmethod
    def marked(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], *_MARK, x.shape[2])

    @staticmethod
    def bare(x: Tensor) -> Tensor:
        return x.flatten(1, 3)

    def gathered(self, x: Tensor) -> Tensor:
        """Chunks -> replicated, for work in a block that is the same on each rank."""
        return self.whole(x) if self.active else x

    def scattered(self, x: Tensor) -> Tensor:
        return self.chunk(x) if self.active else x

    def copied(self, x: Tensor) -> Tensor:
        """The input of column layers: tokens are gathered from the ranks if they are sharded."""
        return enter(x, (self.comm, 1 if self.active else None, torch.float32))


@dataclass(frozen=True)
class Visible:
    """What queries see: keys at earlier places and their own (``causal``), of the last ``window`` places, and
    of the same segment. ``segments``: ``[batch, tokens of the whole sequence]``, a number for each document
    of a packed row; or in bool which keys any query sees, those that are no padding."""

    causal: bool
    window: int | None = None
    segments: Tensor | None = None

    @property
    def earlier_only(self) -> bool:
        """Whether a query sees all earlier keys and its own: what attention kernels call causal."""
        return self.causal and self.window is None and self.segments is None

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Whether each query at a place sees each key: ``[1 or batch, 1, queries, keys]``; None: all of them."""
        masks: list[Tensor] = []
        if self.causal or self.window is not None:
            apart = (queries[:, None] - keys)[None, None]
            if self.causal:
                masks.append(apart >= 0)
            if self.window is not None:
                masks.append((apart if self.causal else apart.abs()) < self.window)
        if self.segments is not None:
            q, k = (self.segments.index_select(1, at)[:, None] for at in (queries, keys))
            masks.append(k[:, :, None] if k.dtype == torch.bool else q[..., None] == k[:, :, None])
        return reduce(Tensor.bitwise_and, masks) if masks else None


def hidden(scores: Tensor, mask: Tensor | None, least: float = -torch.inf) -> Tensor:
    """``scores``, with those of keys that a query does not see at ``least``."""
    return scores if mask is None else scores.masked_fill(~mask, least)


@dataclass(frozen=True)
class Scoring:
    """How a query scores a key: their product times ``scale``, and with ``softcap`` never beyond it, as in Gemma 2.
    ``sink``: queries have features more than keys, with the score of a key that has no token."""

    scale: float
    softcap: float | None = None
    sink: bool = False

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * self.scale
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap

    def slope(self, scores: Tensor) -> Tensor | float:
        """By how much scores grow with the product."""
        return self.scale if self.softcap is None else (1 - (scores / self.softcap) ** 2) * self.scale


def repeat_heads(t: Tensor, queries: int) -> Tensor:
    """Keys' heads, one for each of so many query heads, which share them."""
    n = queries // t.shape[1]
    return t if n == 1 else t.repeat_interleave(n, 1)


def fold_heads(grad: Tensor, keys: int) -> Tensor:
    """Gradients of repeated heads, summed over the query heads that share one."""
    shared: Tensor = grad.unflatten(1, (keys, -1))
    return shared.sum(2)
