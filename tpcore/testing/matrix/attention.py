"""Query, key and value projections against nn.Linear, with shared heads as in grouped-query attention."""

from __future__ import annotations

from functools import partial
from math import gcd

import torch
from torch import Tensor, nn

import tpcore

from ...layout.shard import ShardSpec
from ..kit.samples import multiple
from .cells import Cell, MatrixRow, Reference, grad_of

HIDDEN, HEAD = 12, 3


def _outputs(heads: int, plain: nn.Module, x: Tensor) -> list[Tensor]:
    """q, k and v, with k and v repeated for each query head."""
    out = torch.cat([layer(x) for layer in plain.children()], -1)
    q, k, v = out.split([heads * HEAD, *[(out.shape[-1] - heads * HEAD) // 2] * 2], -1)
    return [q, _repeated(k, heads), _repeated(v, heads)]


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each key or value head for the query heads that share it; then it is cut like those."""
    shared: Tensor = x.unflatten(-1, (-1, HEAD))
    return shared.repeat_interleave(heads // shared.shape[-2], -2).flatten(-2)


def qkv(c: Cell) -> None:
    case, dtype, heads = c.case, c.dtype, multiple(c.size)
    kv = gcd(heads, heads * case.kv_heads // 4)  # as many, half, or few: both numbers or one divides the other
    outputs = [heads * HEAD, kv * HEAD, kv * HEAD]
    torch.manual_seed(7)
    linears = [sum(outputs)] if case.fused else outputs
    plain = nn.ModuleList(nn.Linear(HIDDEN, size, bias=case.bias, dtype=dtype) for size in linears)
    data = torch.randn(*c.lead, HIDDEN).to(dtype)
    grads = [torch.randn(*c.lead, heads * HEAD).to(dtype) for _ in range(3)]
    torch.manual_seed(7)
    layer = tpcore.ParallelQKV(HIDDEN, heads, kv, HEAD, case.bias, dtype, c.ctx.device, fused=case.fused, **c.sequence)
    for ours, theirs in zip(layer.children(), plain, strict=True):
        c.initial(ours, theirs)
    exact, sizes = (Reference(plain, partial(_outputs, heads), data, grads, of) for of in (torch.clone, torch.abs))

    part = partial(c.features, spec=ShardSpec((heads * HEAD,), 0))
    x = c.leaf(c.tokens(data))
    q, k, v = layer(x)
    outs = [q, _repeated(k, heads // c.size), _repeated(v, heads // c.size)]
    for what, out, want, size in zip("qkv", outs, exact.outs, sizes.outs, strict=True):
        c.part(what, out, (want, size), (HIDDEN + 1, 2), part)
    torch.autograd.backward(outs, [c.placed(part(g)) for g in grads])

    # each projection's part is rounded, as are their two sums and the sum over the ranks
    roundings = (3 * heads * HEAD + c.size, 6)
    c.part("input grad", x.grad, (grad_of(exact.x), grad_of(sizes.x)), roundings, c.tokens)
    # query heads that share a head add to its gradient one by one in the dtype; so do its copies
    shared = heads // kv
    terms = shared * data[..., 0].numel() + c.size
    projections = zip(layer.children(), exact.module.children(), sizes.module.children(), strict=True)
    for i, (ours, theirs, large) in enumerate(projections):
        c.gradients(ours, theirs, large, terms, lambda name: shared + 2, f"{i} ")


QKV = MatrixRow(
    "qkv",
    tpcore.ParallelQKV,
    {"seq": (None, 0, 1), "bias": (True, False), "fused": (False, True), "kv_heads": (4, 2, 1)},
    qkv,
)
