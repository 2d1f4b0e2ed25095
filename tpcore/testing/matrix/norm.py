"""Norms against nn.LayerNorm and nn.RMSNorm."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import tpcore

from ...runtime.context import ParallelContext
from .cases import Case, MatrixRow, leading
from .compare import Findings
from .cutting import chunk, grad_of, leaf, scrambled


def norm(ctx: ParallelContext, case: Case, found: Findings) -> None:
    torch.manual_seed(7)
    if case.layer == "rms_norm":
        kinds: tuple[Any, Any] = (tpcore.RMSNorm, nn.RMSNorm)
        options: dict[str, Any] = {"eps": case.eps}
    else:
        kinds = (tpcore.LayerNorm, nn.LayerNorm)
        options = {"elementwise_affine": case.affine != "none", "bias": case.affine == "weight and bias"}
    options["dtype"] = case.torch_dtype
    layer = kinds[0](case.shape, device=ctx.device, sequence_parallel=case.seq is not None, **options)
    plain = kinds[1](case.shape, **options)
    tp = ctx.comm("tp")
    lead = leading(case, ctx)
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_()
    layer.load_state_dict(plain.state_dict())
    exact = copy.deepcopy(plain).double()
    x = torch.randn(*lead, *case.shape).to(case.torch_dtype)
    grad = torch.randn_like(x)
    ours, theirs = (leaf(chunk(x, case.seq, ctx), case, ctx) for _ in range(2))
    mine = scrambled(chunk(grad, case.seq, ctx).to(ctx.device), case.scrambled)
    y, expected = layer(ours), copy.deepcopy(plain).to(ctx.device)(theirs)
    y.backward(mine)
    expected.backward(mine)
    # tokens are independent of each other: this rank's must be equal bit for bit
    found.same("output", y, expected.detach())
    found.same("input grad", ours.grad, theirs.grad)
    plain(x.clone().requires_grad_()).backward(grad)
    exact(x.double().requires_grad_()).backward(grad.double())
    tokens = torch.Size(lead).numel()
    magnitude = grad.double().abs().flatten(0, len(lead) - 1).sum(0) * 3  # |normalized| < 3 for 8 or 12 features
    for name, p in layer.named_parameters():
        reference, own = grad_of(exact.get_parameter(name)), grad_of(plain.get_parameter(name))
        # one rounding for each rank and one of the sum, plus the error of torch's own kernel in this dtype
        allowed = found.bound(magnitude, tokens + 16, 2) + 2 * (own.double() - reference).abs().max()
        found.close(f"{name} grad", p.grad, reference, allowed)
        found.replicated(f"{name} grad", p.grad, tp)
    found.expect(list(layer.state_dict()) == list(plain.state_dict()), "state_dict keys differ")


SHAPES = ((8,), (3, 4))
AFFINE = ("weight and bias", "weight", "none")
LAYER_NORM = MatrixRow("layer_norm", tpcore.LayerNorm, {"seq": (None, 0, 1), "affine": AFFINE, "shape": SHAPES}, norm)
RMS_NORM = MatrixRow("rms_norm", tpcore.RMSNorm, {"seq": (None, 0, 1), "eps": (1e-6, None), "shape": SHAPES}, norm)
