"""Embedding against nn.Embedding."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import tpcore

from ...layout.shard import ShardSpec
from .cells import GARBAGE, Cell, MatrixRow, grad_of, unit


def embedding(c: Cell) -> None:
    case = c.case
    vocab, dim = (case.size, 8) if case.cut == "vocab" else (10, case.size)
    options: dict[str, Any] = {"padding_idx": case.padding_idx}
    if case.mode != "plain":
        options |= {"max_norm": 1.5} if case.mode == "max_norm" else {case.mode: True}
    torch.manual_seed(7)
    plain = nn.Embedding(vocab, dim, dtype=c.dtype, **options)
    exact = copy.deepcopy(plain).double()
    ids = torch.randint(vocab, c.lead)
    ids.view(-1)[0] = 0
    grad = torch.randn(*ids.shape, dim).to(c.dtype)

    torch.manual_seed(7)
    whole = case.cut == "vocab"
    layer = tpcore.ParallelEmbedding(
        vocab,
        dim,
        device=c.ctx.device,
        dtype=c.dtype,
        shard_across_embedding=not whole,
        pad=True,
        **options,
        **c.sequence,
    )
    layer.collect_output = case.cut != "dim uncollected"
    c.initial(layer, plain)

    y, want = layer(c.placed(ids)), exact(ids)
    want.backward(grad.double())
    # a look-up does not round; max_norm sums dim powers in the dtype itself, and scales
    bound = want.detach().abs() * (2 * dim + 8) * unit(c.dtype) * (case.mode == "max_norm")
    if case.cut == "dim uncollected":
        columns = ShardSpec((dim,), 0)
        want, bound = c.features(want.detach(), columns), c.features(bound, columns)
        mine = c.features(grad, columns, GARBAGE)
    else:
        want, bound, mine = (c.tokens(t.detach()) for t in (want, bound, grad))
        if c.seq is None:
            c.replicated("output", y)
    c.close("output", y, want.detach(), bound)
    y.backward(c.placed(mine))
    _compare_weight(c, layer, exact, ids, grad)


def _compare_weight(c: Cell, layer: tpcore.ParallelEmbedding, exact: nn.Embedding, ids: Tensor, grad: Tensor) -> None:
    """The weight's gradient, and the rows that a look-up with max_norm has scaled."""
    # the gradient of a row adds its tokens one by one in the dtype itself, as in torch
    magnitude = torch.zeros_like(exact.weight).index_add(0, ids.flatten(), grad.abs().double().flatten(0, -2))
    bound = magnitude * (ids.numel() + 2) * unit(c.dtype)
    grads = [grad_of(p) for p in (layer.weight, exact.weight)]
    got, dense = (g.to_dense() if g.is_sparse else g for g in grads)
    c.expect(grads[0].is_sparse == (c.case.mode == "sparse"), "the gradient is sparse, or is not")
    want, allowed = (c.shard_of(layer, "weight", t) for t in (dense, bound))
    c.close("weight grad", got, want, allowed)
    if c.case.mode == "max_norm":
        now = exact.weight.detach()
        bound = now.abs() * (2 * exact.embedding_dim + 8) * unit(c.dtype)
        want, allowed = (c.shard_of(layer, "weight", t) for t in (now, bound))
        c.close("weight after", layer.weight, want, allowed)


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
