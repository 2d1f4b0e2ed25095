"""Query, key and value projections against nn.Linear, with shared heads as in grouped-query attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import tpcore

from ...runtime.context import ParallelContext
from .cases import LEADS, Case, MatrixRow
from .compare import Findings, Reference
from .cutting import (
    chunk,
    compare_gradients,
    compare_initial,
    cut_features,
    features,
    grad_of,
    leaf,
    scrambled,
    sequence,
)

HIDDEN, HEADS, HEAD = 12, 4, 3


def _outputs(plain: nn.Module, x: Tensor) -> list[Tensor]:
    """q, k and v, with k and v repeated for each query head."""
    out = torch.cat([layer(x) for layer in plain.children()], -1)
    q, k, v = out.split([HEADS * HEAD, *[(out.shape[-1] - HEADS * HEAD) // 2] * 2], -1)
    return [q, _repeated(k, HEADS), _repeated(v, HEADS)]


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each key or value head for the query heads that share it; then it is cut like those."""
    shared: Tensor = x.unflatten(-1, (-1, HEAD))
    return shared.repeat_interleave(heads // shared.shape[-2], -2).flatten(-2)


def qkv(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp, kv, dtype = ctx.comm("tp"), case.kv_heads, case.torch_dtype
    outputs = [HEADS * HEAD, kv * HEAD, kv * HEAD]
    torch.manual_seed(7)
    linears = [sum(outputs)] if case.fused else outputs
    plain = nn.ModuleList(nn.Linear(HIDDEN, size, bias=case.bias, dtype=dtype) for size in linears)
    data = torch.randn(*LEADS[case.ndim], HIDDEN).to(dtype)
    grads = [torch.randn(*LEADS[case.ndim], HEADS * HEAD).to(dtype) for _ in range(3)]
    torch.manual_seed(7)
    layer = tpcore.ParallelQKV(
        HIDDEN, HEADS, kv, HEAD, case.bias, dtype, ctx.device, fused=case.fused, **sequence(case)
    )
    for ours, theirs in zip(layer.children(), plain, strict=True):
        compare_initial(ours, theirs, ctx, found)
    exact, sizes = (Reference(plain, _outputs, data, grads, of) for of in (torch.clone, torch.abs))

    tokens = partial(chunk, dim=case.seq, ctx=ctx)
    part = partial(cut_features, spec=features(HEADS * HEAD, 1), ctx=ctx)
    x = leaf(tokens(data), case, ctx)
    q, k, v = layer(x)
    heads = HEADS // tp.size
    outs = [q, _repeated(k, heads), _repeated(v, heads)]
    for what, out, want, size in zip("qkv", outs, exact.outs, sizes.outs, strict=True):
        found.part(what, out, (want, size), (HIDDEN + 1, 2), part, tp)
    torch.autograd.backward(outs, [scrambled(part(g).to(ctx.device), case.scrambled) for g in grads])

    # each projection's part is rounded, as are their two sums and the sum over the ranks
    roundings = (3 * HEADS * HEAD + tp.size, 6)
    found.part("input grad", x.grad, (grad_of(exact.x), grad_of(sizes.x)), roundings, tokens, tp)
    # query heads that share a head add to its gradient one by one in the dtype; so do its copies
    shared = HEADS // kv
    terms = shared * data[..., 0].numel() + tp.size
    projections = zip(layer.children(), exact.module.children(), sizes.module.children(), strict=True)
    for i, (ours, theirs, large) in enumerate(projections):
        compare_gradients(ours, theirs, large, terms, lambda name: shared + 2, ctx, found, f"{i} ")


QKV = MatrixRow(
    "qkv",
    tpcore.ParallelQKV,
    {"seq": (None, 0, 1), "bias": (True, False), "fused": (False, True), "kv_heads": (4, 2, 1)},
    qkv,
)
