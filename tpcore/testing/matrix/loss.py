"""Cross entropy over cut logits against F.cross_entropy of the whole logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpcore

from ...runtime.context import ParallelContext
from .cases import Case, MatrixRow, leading
from .compare import Findings, accumulator, unit
from .cutting import GARBAGE, cut_features, features, grad_of, leaf, scrambled


def cross_entropy(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp, vocab, wide = ctx.comm("tp"), case.size, accumulator(case.torch_dtype)
    lead = leading(case, ctx)
    torch.manual_seed(7)
    logits = (torch.randn(*lead, vocab) * case.magnitude).to(case.torch_dtype)
    target = torch.randint(vocab, lead)
    if case.ignored != "none":
        target.view(-1)[: 3 if case.ignored == "some" else None] = case.ignore_index
    grad = torch.randn(lead).to(wide)

    exact = logits.double().requires_grad_()
    want = F.cross_entropy(
        exact.reshape(-1, vocab),
        target.flatten(),
        reduction="none",
        ignore_index=case.ignore_index,
        label_smoothing=case.label_smoothing,
    ).view(lead)
    want.backward(grad.double())

    spec = features(vocab, 1)
    mine = leaf(cut_features(logits, spec, ctx, padding=GARBAGE * case.magnitude), case, ctx)
    before = mine.detach().clone()
    loss = tpcore.parallel_cross_entropy(
        mine, target.to(ctx.device), case.label_smoothing, case.ignore_index, vocab_size=vocab
    )
    # log-sum-exp, the target's logit and the mean over the vocabulary err by some u of the largest logit
    top = 1 + logits.double().abs().max()
    kept = (target != case.ignore_index).double()
    found.close("loss", loss, want.detach(), kept * top * (vocab + 16) * unit(wide), dtype=wide)
    found.replicated("loss", loss, tp)
    loss.backward(scrambled(grad.to(ctx.device), case.scrambled))

    # exp(x - lse) has the relative error of x - lse's absolute one; one rounding to the logits' dtype
    slope = (grad.double().abs() * kept).unsqueeze(-1).expand(*lead, vocab)
    bound = slope * (2 * unit(case.torch_dtype) + 16 * unit(wide) * top)
    found.close("input grad", mine.grad, cut_features(grad_of(exact), spec, ctx), cut_features(bound, spec, ctx))
    found.same("logits afterwards", mine.detach(), before)


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
