"""Query, key and value projections against nn.Linear, their heads shared as in grouped-query attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...context import ParallelContext
from .cases import LEADS, Case, MatrixRow
from .compare import Findings
from .cutting import chunk, cut_features, features, leaf, scrambled, sequence, shard_of

HIDDEN, HEADS, HEAD = 12, 4, 3


def _expanded(x: Tensor, kv_heads: int, dim: int) -> Tensor:
    """Each key or value head as often as query heads share it, which are then cut like those."""
    heads: Tensor = x.unflatten(dim, (kv_heads, HEAD))
    return heads.repeat_interleave(HEADS // kv_heads, dim).flatten(dim, dim + 1)


def _folded(grad: Tensor, kv_heads: int) -> Tensor:
    """The transpose of ``_expanded``, along dim 0."""
    shared: Tensor = grad.unflatten(0, (kv_heads, HEADS // kv_heads, HEAD))
    return shared.sum(1).flatten(0, 1)


def qkv(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp, kv, dtype = ctx.comm("tp"), case.kv_heads, case.torch_dtype
    sizes = [HEADS * HEAD, kv * HEAD, kv * HEAD]
    torch.manual_seed(7)
    outputs = [sum(sizes)] if case.fused else sizes
    plain = [nn.Linear(HIDDEN, size, bias=case.bias, dtype=dtype) for size in outputs]
    lead = LEADS[case.ndim]
    data = torch.randn(*lead, HIDDEN).to(dtype)
    grads = [torch.randn(*lead, HEADS * HEAD).to(dtype) for _ in range(3)]
    torch.manual_seed(7)
    layer = tpcore.ParallelQKV(
        HIDDEN, HEADS, kv, HEAD, case.bias, dtype, ctx.device, fused=case.fused, **sequence(case)
    )
    for ours, theirs in zip(layer.children(), plain, strict=True):
        for name, p in theirs.named_parameters():
            found.same(
                f"initial {name}", ours.get_parameter(name).detach(), shard_of(ours, name, p.detach(), ctx)
            )

    x = leaf(chunk(data, case.seq, ctx), case, ctx)
    q, k, v = layer(x)
    per_head = HEADS // tp.size // layer.local_kv_heads
    outs = [q, *(t.unflatten(-1, (-1, HEAD)).repeat_interleave(per_head, -2).flatten(-2) for t in (k, v))]

    weight = torch.cat([p.weight.detach().double() for p in plain]).split(sizes)
    w = [weight[0], *(_expanded(t, kv, 0) for t in weight[1:])]
    b: list[Tensor] | None = None
    if case.bias:
        bias = torch.cat([p.bias.detach().double() for p in plain]).split(sizes)
        b = [bias[0], *(_expanded(t, kv, 0) for t in bias[1:])]
    wide, heads = data.double(), features(HEADS * HEAD, 1)
    loss = torch.zeros((), dtype=torch.float64, device=ctx.device).to(dtype)
    for i, (what, out) in enumerate(zip("qkv", outs, strict=True)):
        want = F.linear(wide, w[i], None if b is None else b[i])
        bound = found.bound(
            F.linear(wide.abs(), w[i].abs(), None if b is None else b[i].abs()), HIDDEN + 1, 2
        )
        found.close(what, out, cut_features(want, heads, ctx), cut_features(bound, heads, ctx))
        mine = cut_features(grads[i], heads, ctx).to(ctx.device)
        loss = loss + (out * scrambled(mine, case.scrambled)).sum()
    loss.backward()

    rows, tokens = wide.flatten(0, -2), wide[..., 0].numel()
    slopes = [g.double().flatten(0, -2) for g in grads]
    terms = 3 * HEADS * HEAD + tp.size
    # each projection's part is rounded by itself, and so are their two sums and the sum over the ranks
    allowed = found.bound(
        sum((g.double().abs() @ m.abs() for g, m in zip(grads, w, strict=True)), wide * 0), terms, 6
    )
    want = sum((g.double() @ m for g, m in zip(grads, w, strict=True)), wide * 0)
    found.close("input grad", x.grad, chunk(want, case.seq, ctx), chunk(allowed, case.seq, ctx))
    if case.seq is None:
        found.replicated("input grad", x.grad, tp)
    counts = (HEADS, kv, kv)
    gw, gw_abs = (
        torch.cat([_folded(h(g).t() @ h(rows), n) for g, n in zip(slopes, counts, strict=True)]).split(
            outputs
        )
        for h in (lambda t: t, torch.abs)
    )
    gb, gb_abs = (
        torch.cat([_folded(h(g).sum(0), n) for g, n in zip(slopes, counts, strict=True)]).split(outputs)
        for h in (lambda t: t, torch.abs)
    )
    # query heads that share a head add to it one by one, each in the dtype, and so do its copies
    roundings = HEADS // kv + 2
    for i, ours in enumerate(layer.children()):
        values = {"weight": (gw[i], gw_abs[i])} | ({"bias": (gb[i], gb_abs[i])} if case.bias else {})
        for name, (exact, magnitude) in values.items():
            bound = found.bound(magnitude, HEADS // kv * tokens + tp.size, roundings)
            want, bound = (shard_of(ours, name, t, ctx) for t in (exact, bound))
            found.close(f"{i} {name} grad", ours.get_parameter(name).grad, want, bound)


QKV = MatrixRow(
    "qkv",
    tpcore.ParallelQKV,
    {"seq": (None, 0, 1), "bias": (True, False), "fused": (False, True), "kv_heads": (4, 2, 1)},
    qkv,
)
