"""Query, key and value projections against nn.Linear, with shared heads as in grouped-query attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import tpcore

from ...runtime.context import ParallelContext
from .cases import LEADS, Case, MatrixRow
from .compare import Findings
from .cutting import (
    chunk,
    compare_initial,
    cut_features,
    features,
    grad_of,
    leaf,
    scrambled,
    sequence,
    shard_of,
)

HIDDEN, HEADS, HEAD = 12, 4, 3
Values = Callable[[Tensor], Tensor]


class _Dense:
    """q, k and v of plain layers in float64, with k and v repeated for each query head, and all gradients.

    ``of`` is applied to every tensor first. With ``torch.abs`` the results are magnitudes for the bounds.
    """

    def __init__(self, plain: Sequence[nn.Linear], x: Tensor, grads: Sequence[Tensor], of: Values) -> None:
        self.layers = [copy.deepcopy(layer).double() for layer in plain]
        with torch.no_grad():
            for p in (p for layer in self.layers for p in layer.parameters()):
                p.copy_(of(p))
        self.x = of(x.double()).requires_grad_()
        out = torch.cat([layer(self.x) for layer in self.layers], -1)
        q, k, v = out.split([HEADS * HEAD, *[(out.shape[-1] - HEADS * HEAD) // 2] * 2], -1)
        self.outs = [q, _repeated(k, HEADS), _repeated(v, HEADS)]
        torch.autograd.backward(self.outs, [of(g.double()) for g in grads])


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each key or value head for the query heads that share it; then it is cut like those."""
    shared: Tensor = x.unflatten(-1, (-1, HEAD))
    return shared.repeat_interleave(heads // shared.shape[-2], -2).flatten(-2)


def _compare_gradients(
    layer: nn.Module, case: Case, want: _Dense, sizes: _Dense, ctx: ParallelContext, found: Findings
) -> None:
    tp, shared = ctx.comm("tp"), HEADS // case.kv_heads
    terms = shared * want.x[..., 0].numel() + tp.size
    # query heads that share a head add to its gradient one by one in the dtype; so do its copies
    for i, (ours, exact, size) in enumerate(zip(layer.children(), want.layers, sizes.layers, strict=True)):
        for name, p in exact.named_parameters():
            bound = found.bound(grad_of(size.get_parameter(name)), terms, shared + 2)
            part, allowed = (shard_of(ours, name, t, ctx) for t in (grad_of(p), bound))
            found.close(f"{i} {name} grad", ours.get_parameter(name).grad, part, allowed)


def qkv(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp, kv, dtype = ctx.comm("tp"), case.kv_heads, case.torch_dtype
    outputs = [HEADS * HEAD, kv * HEAD, kv * HEAD]
    torch.manual_seed(7)
    plain = [
        nn.Linear(HIDDEN, size, bias=case.bias, dtype=dtype) for size in ([sum(outputs)] if case.fused else outputs)
    ]
    data = torch.randn(*LEADS[case.ndim], HIDDEN).to(dtype)
    grads = [torch.randn(*LEADS[case.ndim], HEADS * HEAD).to(dtype) for _ in range(3)]
    torch.manual_seed(7)
    layer = tpcore.ParallelQKV(
        HIDDEN, HEADS, kv, HEAD, case.bias, dtype, ctx.device, fused=case.fused, **sequence(case)
    )
    for ours, theirs in zip(layer.children(), plain, strict=True):
        compare_initial(ours, theirs, ctx, found)

    x = leaf(chunk(data, case.seq, ctx), case, ctx)
    q, k, v = layer(x)
    heads = HEADS // tp.size
    outs = [q, _repeated(k, heads), _repeated(v, heads)]
    want, sizes = (_Dense(plain, data, grads, of) for of in (torch.clone, torch.abs))
    columns = features(HEADS * HEAD, 1)
    for what, out, exact, size in zip("qkv", outs, want.outs, sizes.outs, strict=True):
        bound = found.bound(size.detach(), HIDDEN + 1, 2)
        part, allowed = (cut_features(t, columns, ctx) for t in (exact.detach(), bound))
        found.close(what, out, part, allowed)
    mine = (cut_features(g, columns, ctx).to(ctx.device) for g in grads)
    torch.autograd.backward(outs, [scrambled(g, case.scrambled) for g in mine])

    # each projection's part is rounded, as are their two sums and the sum over the ranks
    bound = found.bound(grad_of(sizes.x), 3 * HEADS * HEAD + tp.size, 6)
    part, allowed = (chunk(t, case.seq, ctx) for t in (grad_of(want.x), bound))
    found.close("input grad", x.grad, part, allowed)
    if case.seq is None:
        found.replicated("input grad", x.grad, tp)
    _compare_gradients(layer, case, want, sizes, ctx, found)


QKV = MatrixRow(
    "qkv",
    tpcore.ParallelQKV,
    {"seq": (None, 0, 1), "bias": (True, False), "fused": (False, True), "kv_heads": (4, 2, 1)},
    qkv,
)
