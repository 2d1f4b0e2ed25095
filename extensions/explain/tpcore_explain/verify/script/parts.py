"""How the tensors of several ranks make up that of one process: found by their values, so no library has to say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE, PART, SUM, NONE = "whole", "part", "sum", "none"

Close = Callable[[Tensor, Tensor], bool]


class Fit(NamedTuple):
    """``kind``: each rank has the whole; a part of it; what it adds to the sum of ranks; or none of these."""

    kind: str
    blocks: Sequence[Tensor] = ()
    """Of NONE: what each rank should have, by the nearest guess; empty where no part has this shape."""


def fit(whole: Tensor, ranks: Sequence[Tensor], close: Close, near: Close) -> Fit:
    """Of the ranks that have the tensor, in rank order. ``near``: as ``close``, of sums; what ranks have near the whole
    is none, whose mean it would be."""
    guesses = []
    for blocks, group in _divisions(whole, ranks):
        if all(map(close, ranks, blocks)):
            return Fit(PART if blocks[0].shape != whole.shape else WHOLE)
        if whole.is_floating_point() and not all(map(near, ranks, blocks)) and _adds_up(ranks, blocks, group, near):
            return Fit(SUM)
        guesses.append(blocks)
    if _same_slices(whole, ranks, close):
        return Fit(PART)
    nearest = min(guesses, key=lambda blocks: _distance(ranks, blocks), default=())
    return Fit(NONE, nearest)


def _divisions(whole: Tensor, ranks: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[int]]]:
    """Ways to divide ``whole`` into equal parts of the ranks' shape: the part of each rank, and its number. The ranks
    that have one part may be neighbours or not, and a part may be every n-th entry."""
    shape, count = ranks[0].shape, len(ranks)
    if any(r.shape != shape for r in ranks) or len(shape) != whole.ndim:
        return
    dims = [d for d in range(whole.ndim) if shape[d] != whole.shape[d]]
    if any(not shape[d] or whole.shape[d] % shape[d] for d in dims):
        return
    orders = []
    for d in dims:
        parts = whole.shape[d] // shape[d]
        inner = [n for n in range(1, count + 1) if count % (n * parts) == 0]
        orders.append([[(r // n) % parts for r in range(count)] for n in inner])
    for order in product(*orders):
        for strided in (False, True)[: 1 + bool(dims)]:
            blocks = []
            for r in range(count):
                block = whole
                for d, places in zip(dims, order, strict=True):
                    parts = whole.shape[d] // shape[d]
                    every = range(places[r], whole.shape[d], parts)
                    block = (
                        block.index_select(d, torch.tensor(every))
                        if strided
                        else block.narrow(d, places[r] * shape[d], shape[d])
                    )
                blocks.append(block)
            yield blocks, [hash(tuple(places[r] for places in order)) for r in range(count)]


def _adds_up(ranks: Sequence[Tensor], blocks: Sequence[Tensor], group: Sequence[int], close: Close) -> bool:
    """Whether the ranks of each part add up to it. Ranks that have the same may be counted several times; as often as
    there are ranks, which is a mean, only for a number, as for a loss of each rank's examples."""
    totals = {g: torch.stack([r.double() for r, h in zip(ranks, group, strict=True) if h == g]).sum(0) for g in group}
    members = group.count(group[0])
    copies = [c for c in range(1, members) if members % c == 0]
    if not blocks[0].ndim and members > 1:
        copies.append(members)
    return any(all(close(totals[g] / c, b) for g, b in zip(group, blocks, strict=True)) for c in copies)


def _same_slices(whole: Tensor, ranks: Sequence[Tensor], close: Close) -> bool:
    """Whether, along one dim, every slice of every rank is one of ``whole``, in any order, or padding of zeros, and
    every slice of ``whole`` is on some rank: heads or blocks of a product of several, tokens in pairs, uneven parts."""
    if any(r.ndim != whole.ndim for r in ranks) or not whole.is_floating_point():
        return False
    dims = {d for r in ranks for d in range(whole.ndim) if r.shape[d] != whole.shape[d]}
    if len(dims) == 2 and len({r.shape for r in ranks}) == 1:  # parts of a batch too
        return any(_divided_first(whole, ranks, d, close) for d in sorted(dims))
    if len(dims) != 1 or not whole.numel():
        return False
    (dim,) = dims
    mine = torch.cat([_rows(r, dim) for r in ranks if r.numel()])
    all_ = _rows(whole, dim)
    mine = mine[(mine != 0).any(1)]
    full = all_[(all_ != 0).any(1)]
    if not len(mine) or not len(full):
        return not len(mine) and not len(full)
    return close(mine, full[_nearest(mine, full)]) and close(full, mine[_nearest(full, mine)])


def _rows(value: Tensor, dim: int) -> Tensor:
    """Its slices along ``dim``, each in a row."""
    return value.double().movedim(dim, 0).reshape(value.shape[dim], -1)


def _divided_first(whole: Tensor, ranks: Sequence[Tensor], dim: int, close: Close) -> bool:
    size = ranks[0].shape[dim]
    parts, rest = divmod(whole.shape[dim], size)
    if rest or len(ranks) % parts:
        return False
    each = len(ranks) // parts
    for places in ([r // each for r in range(len(ranks))], [r % parts for r in range(len(ranks))]):
        blocks = [
            (whole.narrow(dim, p * size, size), [r for r, at in zip(ranks, places, strict=True) if at == p])
            for p in range(parts)
        ]
        if all(_same_slices(block, own, close) for block, own in blocks):
            return True
    return False


def _nearest(rows: Tensor, others: Tensor) -> Tensor:
    """For each of ``rows`` the number of that of ``others`` which is nearest, by some random sums of them."""
    weights = torch.randn(rows.shape[1], 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.cdist(rows @ weights, others @ weights, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)


def _distance(ranks: Sequence[Tensor], blocks: Sequence[Tensor]) -> float:
    apart = (r.double() - b.double() for r, b in zip(ranks, blocks, strict=True))
    return sum(float(d.abs().nan_to_num(0.0).max()) if d.numel() else 0.0 for d in apart)
