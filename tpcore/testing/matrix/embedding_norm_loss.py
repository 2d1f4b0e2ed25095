"""Embedding against nn.Embedding, norms against nn.LayerNorm and nn.RMSNorm, and cross entropy over cut logits against
F.cross_entropy of the whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...layout.shard import ShardSpec
from .cells import GARBAGE, Cell, MatrixRow, accumulator, grad_of, unit


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


def norm(c: Cell) -> None:
    case = c.case
    torch.manual_seed(7)
    if case.layer == "rms_norm":
        kinds: tuple[Any, Any] = (tpcore.RMSNorm, nn.RMSNorm)
        options: dict[str, Any] = {"eps": case.eps}
    else:
        kinds = (tpcore.LayerNorm, nn.LayerNorm)
        options = {"elementwise_affine": case.affine != "none", "bias": case.affine == "weight and bias"}
    options["dtype"] = c.dtype
    layer = kinds[0](case.shape, device=c.ctx.device, sequence_parallel=c.seq is not None, **options)
    plain = kinds[1](case.shape, **options)
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_()
    layer.load_state_dict(plain.state_dict())
    exact = copy.deepcopy(plain).double()
    x = torch.randn(*c.lead, *case.shape).to(c.dtype)
    grad = torch.randn_like(x)
    ours, theirs = (c.leaf(c.tokens(x)) for _ in range(2))
    mine = c.placed(c.tokens(grad))
    y, expected = layer(ours), copy.deepcopy(plain).to(c.ctx.device)(theirs)
    y.backward(mine)
    expected.backward(mine)
    # tokens are independent of each other: this rank's must be equal bit for bit
    c.same("output", y, expected.detach())
    c.same("input grad", ours.grad, theirs.grad)
    plain(x.clone().requires_grad_()).backward(grad)
    exact(x.double().requires_grad_()).backward(grad.double())
    tokens = torch.Size(c.lead).numel()
    magnitude = grad.double().abs().flatten(0, len(c.lead) - 1).sum(0) * 3  # |normalized| < 3 for 8 or 12 features
    for name, p in layer.named_parameters():
        reference, rounded = grad_of(exact.get_parameter(name)), grad_of(plain.get_parameter(name))
        # one rounding for each rank and one of the sum, plus the error of torch's rounded kernel in this dtype
        allowed = c.bound(magnitude, tokens + 16, 2) + 2 * (rounded.double() - reference).abs().max()
        c.close(f"{name} grad", p.grad, reference, allowed)
        c.replicated(f"{name} grad", p.grad)
    c.expect(list(layer.state_dict()) == list(plain.state_dict()), "state_dict keys differ")


def cross_entropy(c: Cell) -> None:
    case, vocab, wide = c.case, c.case.size, accumulator(c.dtype)
    torch.manual_seed(7)
    logits = (torch.randn(*c.lead, vocab) * case.magnitude).to(c.dtype)
    target = torch.randint(vocab, c.lead)
    if case.ignored != "none":
        target.view(-1)[: 3 if case.ignored == "some" else None] = case.ignore_index
    grad = torch.randn(c.lead).to(wide)
    exact = logits.double().requires_grad_()
    flat, smoothing = exact.reshape(-1, vocab), case.label_smoothing
    want = F.cross_entropy(
        flat, target.flatten(), reduction="none", ignore_index=case.ignore_index, label_smoothing=smoothing
    ).view(c.lead)
    want.backward(grad.double())

    spec = ShardSpec((vocab,), 0)
    mine = c.leaf(c.features(logits, spec, padding=GARBAGE * case.magnitude))
    before = mine.detach().clone()
    loss = tpcore.parallel_cross_entropy(mine, target.to(c.ctx.device), smoothing, case.ignore_index, vocab_size=vocab)
    # log-sum-exp, the target's logit and the mean over the vocabulary err by some u of the largest logit
    top = 1 + logits.double().abs().max()
    kept = (target != case.ignore_index).double()
    c.close("loss", loss, want.detach(), kept * top * (vocab + 16) * unit(wide), dtype=wide)
    c.replicated("loss", loss)
    loss.backward(c.placed(grad))

    # exp(x - lse) has the relative error of x - lse's absolute one; one rounding to the logits' dtype
    slope = (grad.double().abs() * kept).unsqueeze(-1).expand(*c.lead, vocab)
    bound = slope * (2 * unit(c.dtype) + 16 * unit(wide) * top)
    c.close("input grad", mine.grad, c.features(grad_of(exact), spec), c.features(bound, spec))
    c.same("logits afterwards", mine.detach(), before)


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
SHAPES = ((8,), (3, 4))
AFFINE = ("weight and bias", "weight", "none")
LAYER_NORM = MatrixRow("layer_norm", tpcore.LayerNorm, {"seq": (None, 0, 1), "affine": AFFINE, "shape": SHAPES}, norm)
RMS_NORM = MatrixRow("rms_norm", tpcore.RMSNorm, {"seq": (None, 0, 1), "eps": (1e-6, None), "shape": SHAPES}, norm)
CROSS_ENTROPY = MatrixRow(
    "cross_entropy",
    tpcore.parallel_cross_entropy,
    {
        "size": (12, 5),
        "label_smoothing": (0.0, 0.1, 1.0),
        "ignore_index": (-100, 2),
        "ignored": ("none", "some", "all"),
        "magnitude": (1.0, 1000.0),
    },
    cross_entropy,
)
