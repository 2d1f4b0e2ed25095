"""Context parallelism: attention over sequences of which each rank holds some of the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..runtime.context import current
from .fused import autocast_of
from .ring import ring_attention
from .tokens import Scoring, TokenOrder, Visible, hidden, repeat_heads

Way = Literal["gather", "ulysses", "ring"]


def checked_way(way: str, *others: str) -> Way:
    if way not in get_args(Way):
        raise ValueError(f"context_parallel is {' or '.join(map(repr, (*get_args(Way), *others)))}, not {way!r}")
    return cast(Way, way)


LARGEST_MASK = 2**24
"""Pairs of queries and keys up to which one mask holds all of them. Beyond, it would be most of the memory: queries are
taken in runs, each with a mask of a quarter of that, which is made again for backward."""


@dataclass(frozen=True)
class _Masked:
    """Attention under a mask. ``queries``, ``keys``: their places."""

    visible: Visible
    queries: Tensor
    keys: Tensor
    scoring: Scoring

    @property
    def masks(self) -> int:
        return 1 if self.visible.segments is None else len(self.visible.segments)

    def rows(self, q: Tensor) -> int:
        """How many queries are taken at a time."""
        batch, heads, count, _ = q.shape
        # with a softcap there are scores, too
        pairs = (self.masks if self.scoring.softcap is None else batch * heads) * len(self.keys)
        return count if count * pairs <= LARGEST_MASK else max(LARGEST_MASK // 4 // pairs, 1)

    def mask(self, rows: slice, k: Tensor) -> Tensor | None:
        mask, more = self.visible.mask(self.queries[rows], self.keys), k.shape[2] - len(self.keys)
        if mask is None or more == 0:
            return mask
        return torch.cat([mask, mask.new_ones(*mask.shape[:3], more)], -1)  # all queries see the key of _with_sink

    def run(self, q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
        """Some of the queries, by a mask that is not kept. Of tensors without values one run stands for all, which
        would only take time."""
        if not q.is_meta:
            return self(q, k, v, rows)
        # the shape of all masks in the memory of one entry: a run's mask and scores are no part of what a step holds
        mask = q.new_ones(1, dtype=torch.bool).expand(self.masks, 1, q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scoring.scale)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
        mask, scoring = self.mask(rows, k), self.scoring
        if scoring.softcap is None:
            return F.scaled_dot_product_attention(q[:, :, rows], k, v, attn_mask=mask, scale=scoring.scale)
        scores = scoring(q[:, :, rows], k)  # under autocast of another dtype than q
        scores = hidden(scores, mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v  # of a query that sees no key, numbers: minus infinities would give none


class _InRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attend: _Masked) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.attend, size = attend, q.shape[2] if q.is_meta else attend.rows(q)
        ctx.runs = [slice(at, at + size) for at in range(0, q.shape[2], size)]
        ctx.autocast = autocast_of(q.device.type)
        first = attend.run(q, k, v, ctx.runs[0])
        whole = first.new_empty(*q.shape[:3], first.shape[3])  # parts kept for a cat would lie between the masks' holes
        whole[:, :, ctx.runs[0]] = first
        for rows in ctx.runs[1:]:
            whole[:, :, rows] = attend.run(q, k, v, rows)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        gradients = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in saved]
        for rows in ctx.runs:
            with torch.enable_grad(), ctx.autocast():
                out = ctx.attend.run(*saved, rows)
            for total, more in zip(gradients, torch.autograd.grad(out, saved, grad[:, :, rows]), strict=True):
                total.add_(more)
        return *(total.to(t.dtype) for total, t in zip(gradients, saved, strict=True)), None


_SINK = 8
"""Features of a query that hold its head's sink, one number, so that kernels find their multiples of 8."""


def _scored_sinks(q: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Queries whose product with the key of ``_with_sink`` is the sink of their head."""
    last = (sinks.to(q.dtype) / scale)[:, None, None].expand(*q.shape[:3], 1)
    return torch.cat([q, F.pad(last, (0, _SINK - 1))], -1)


def _with_sink(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys with one more, for queries of ``_scored_sinks``; its value is zero, and all values are as wide as before."""
    k, v = (F.pad(t, (0, _SINK, 0, 1)) for t in (k, v))
    at = torch.arange(k.shape[2], device=k.device) == k.shape[2] - 1
    feature = torch.arange(k.shape[3], device=k.device) == k.shape[3] - _SINK
    return k + (at[:, None] & feature), v


def _attended(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, queries: Tensor, keys: Tensor, scoring: Scoring
) -> Tensor:
    size = v.shape[-1]
    if scoring.sink:
        k, v = _with_sink(k, v)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    if visible.earlier_only and queries is keys and scoring.softcap is None and not scoring.sink:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scoring.scale)
    attend = _Masked(visible, queries, keys, scoring)
    whole = attend.rows(q) == q.shape[2]
    output: Tensor = attend(q, k, v, slice(None)) if whole else _InRuns.apply(q, k, v, attend)
    return output[..., :size]


def gathered(q: Tensor, k: Tensor, v: Tensor, visible: Visible, order: TokenOrder, scoring: Scoring) -> Tensor:
    """Each rank's queries against the keys of all ranks, which are gathered; with few key heads these are the
    fewest bytes. The gradients of keys are summed to their rank."""
    length = q.shape[2] * order.comm.size
    k, v = ops.all_gather(k, order.comm, 2), ops.all_gather(v, order.comm, 2)
    places = order.all_places(length)
    return _attended(q, k, v, visible, places if order.comm.size == 1 else order.places(length), places, scoring)


def check_heads(heads: int, ranks: int) -> None:
    if heads % ranks:
        fit = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"context_parallel='ulysses' deals heads to {ranks} ranks, and {heads} heads fit "
            f"cp={', '.join(map(str, fit))} only: use one of these, or 'gather'"
        )


def exchanged(q: Tensor, k: Tensor, v: Tensor, visible: Visible, order: TokenOrder, scoring: Scoring) -> Tensor:
    """Some heads of all tokens instead of all heads of some tokens, by an all-to-all, and back. Jacobs et al.
    2023, DeepSpeed-Ulysses, arXiv:2309.14509."""
    comm = order.comm
    check_heads(q.shape[1], comm.size)
    if k.shape[1] % comm.size:  # fewer key heads than ranks: each rank gets those of its query heads
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    q, k, v = (ops.all_to_all(t, comm, 1, 2) for t in (q, k, v))
    at = order.all_places(q.shape[2])
    return ops.all_to_all(_attended(q, k, v, visible, at, at, scoring), comm, 2, 1)


class ContextParallelAttention(nn.Module):
    """``scaled_dot_product_attention`` over sequences whose tokens are dealt to ranks.

    ``way``: "gather" (keys and values of all ranks on each), "ulysses" (heads against tokens; the ranks must
    divide the heads) or "ring" (keys pass from rank to rank; memory for this rank's tokens only). No second
    derivatives under "ring", nor with masks of more than ``LARGEST_MASK`` pairs. ``causal``, ``window``: which keys
    a query sees; ``scale``: default ``head_dim ** -0.5``; ``softcap``: scores stay below it, as in Gemma 2.
    ``context_parallel_group``: a Comm; default: the ``cp`` axis of the mesh, one rank where it has none.

    Under "ring" and ``causal`` tokens are dealt in zig-zag: take them with ``order.cut(x, dim)`` in any case.
    """

    def __init__(
        self,
        way: str = "gather",
        *,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        context_parallel_group: Comm | None = None,
    ) -> None:
        super().__init__()
        self.way, self.causal, self.window, self.scale = checked_way(way), causal, window, scale
        self.softcap = softcap
        if window is not None and window < 1:
            raise ValueError(f"window must be 1 token or more, not {window}")
        if context_parallel_group is None:
            context_parallel_group = current().comm(*current().mesh.present(("cp",)))
        self.order = TokenOrder(context_parallel_group, way == "ring" and causal)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None, *, sinks: Tensor | None = None
    ) -> Tensor:
        """``q``: ``[batch, heads, tokens of this rank, head_dim]``; ``k``, ``v``: with as many heads or a divisor
        of them. ``segments``: ``[batch, tokens of the whole sequence]``, the same on every rank; queries see
        keys of their own segment only; or in bool, which keys are seen at all. ``sinks``: ``[heads]``, for each
        a score that takes its share of the softmax and has no value, as in GPT-OSS. Returns a tensor like ``q``."""
        visible = Visible(self.causal, self.window, segments)
        return attention(self.way, q, k, v, visible, self.order, self.scale, self.softcap, sinks)

    def extra_repr(self) -> str:
        return f"{self.way!r}, cp={self.order.comm.size}, causal={self.causal}, window={self.window}"


def attention(
    way: Way,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    order: TokenOrder,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks."""
    scoring = Scoring(q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} beside {q.shape[1]} heads: pass one for each head")
    if sinks is not None and softcap is not None:
        raise ValueError(f"attention has sinks and softcap={softcap}: whether the cap holds for sinks is not known")
    if way == "ring":
        return ring_attention(q, k, v, visible, order, scoring, sinks)
    if sinks is not None:
        q, scoring = _scored_sinks(q, sinks, scoring.scale), replace(scoring, sink=True)
    return (gathered if way == "gather" else exchanged)(q, k, v, visible, order, scoring)
