"""Embedding against nn.Embedding."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import tpcore

from ...runtime.context import ParallelContext
from .cases import Case, MatrixRow, leading
from .compare import Findings, unit
from .cutting import GARBAGE, chunk, compare_initial, cut_features, features, grad_of, scrambled, sequence, shard_of


def _compare_weight(
    layer: tpcore.ParallelEmbedding,
    exact: nn.Embedding,
    ids: Tensor,
    grad: Tensor,
    case: Case,
    ctx: ParallelContext,
    found: Findings,
) -> None:
    """Check the weight's gradient, and the rows that a look-up with max_norm has scaled."""
    # the gradient of a row adds its tokens one by one in the dtype itself, as in torch
    magnitude = torch.zeros_like(exact.weight).index_add(0, ids.flatten(), grad.abs().double().flatten(0, -2))
    bound = magnitude * (ids.numel() + 2) * unit(case.torch_dtype)
    grads = [grad_of(p) for p in (layer.weight, exact.weight)]
    got, dense = (g.to_dense() if g.is_sparse else g for g in grads)
    found.expect(grads[0].is_sparse == (case.mode == "sparse"), "the gradient is sparse, or is not")
    local, allowed = shard_of(layer, "weight", dense, ctx), shard_of(layer, "weight", bound, ctx)
    found.close("weight grad", got, local, allowed)
    if case.mode == "max_norm":
        now = exact.weight.detach()
        allowed = shard_of(layer, "weight", now.abs() * (2 * exact.embedding_dim + 8) * unit(case.torch_dtype), ctx)
        found.close("weight after", layer.weight, shard_of(layer, "weight", now, ctx), allowed)


def embedding(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp = ctx.comm("tp")
    vocab, dim = (case.size, 8) if case.cut == "vocab" else (10, case.size)
    options: dict[str, Any] = {"padding_idx": case.padding_idx}
    if case.mode == "max_norm":
        options |= {"max_norm": 1.5}
    elif case.mode != "plain":
        options |= {case.mode: True}
    torch.manual_seed(7)
    plain = nn.Embedding(vocab, dim, dtype=case.torch_dtype, **options)
    exact = copy.deepcopy(plain).double()
    ids = torch.randint(vocab, leading(case, ctx))
    ids.view(-1)[0] = 0
    grad = torch.randn(*ids.shape, dim).to(case.torch_dtype)

    torch.manual_seed(7)
    layer = tpcore.ParallelEmbedding(
        vocab,
        dim,
        device=ctx.device,
        dtype=case.torch_dtype,
        shard_across_embedding=case.cut != "vocab",
        pad=True,
        **options,
        **sequence(case),
    )
    layer.collect_output = case.cut != "dim uncollected"
    compare_initial(layer, plain, ctx, found)

    y, want = layer(scrambled(ids, case.scrambled).to(ctx.device)), exact(ids)
    want.backward(grad.double())
    # a look-up does not round; max_norm sums dim powers in the dtype itself, and scales
    bound = want.detach().abs() * (2 * dim + 8) * unit(case.torch_dtype) * (case.mode == "max_norm")
    columns = features(dim, 1)
    if case.cut == "dim uncollected":
        want, bound = cut_features(want.detach(), columns, ctx), cut_features(bound, columns, ctx)
        mine = cut_features(grad, columns, ctx, GARBAGE)
    else:
        want, bound, mine = (chunk(t.detach(), case.seq, ctx) for t in (want, bound, grad))
        if case.seq is None:
            found.replicated("output", y, tp)
    found.close("output", y, want.detach(), bound)
    y.backward(scrambled(mine.to(ctx.device), case.scrambled))
    _compare_weight(layer, exact, ids, grad, case, ctx, found)


EMBEDDING = MatrixRow(
    "embedding",
    tpcore.ParallelEmbedding,
    {
        "seq": (None, 0, 1),
        "cut": ("vocab", "dim", "dim uncollected"),
        "size": (12, 5),
        "padding_idx": (None, 0, -1),
        "mode": ("plain", "sparse", "scale_grad_by_freq", "max_norm"),
    },
    embedding,
    lambda o: o["cut"] != "dim uncollected" or o["seq"] is None,
)
