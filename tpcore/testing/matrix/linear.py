"""Column and row linear against nn.Linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ... import ops
from ...context import ParallelContext
from .cases import LEADS, Case
from .compare import Findings
from .cutting import (
    GARBAGE,
    chunk,
    compare_initial,
    cut_features,
    features,
    leaf,
    scrambled,
    sequence,
    shard_of,
)

IN_FEATURES = 12  # of a column layer; outputs of a row layer


@dataclass
class Plain:
    """What the plain module computes in float64, and for each result the same over absolute values."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    grad: Tensor

    def __post_init__(self) -> None:
        w, x, g = (t.detach().double() for t in (self.weight, self.x, self.grad))
        b = None if self.bias is None else self.bias.detach().double()
        self.y, self.y_abs = F.linear(x, w, b), F.linear(x.abs(), w.abs(), None if b is None else b.abs())
        self.gx, self.gx_abs = g @ w, g.abs() @ w.abs()
        rows_x, rows_g = x.flatten(0, -2), g.flatten(0, -2)
        self.gw, self.gw_abs = rows_g.t() @ rows_x, rows_g.t().abs() @ rows_x.abs()
        self.gb, self.gb_abs = rows_g.sum(0), rows_g.abs().sum(0)


def _plain(case: Case, outputs: int, inputs: int) -> tuple[nn.Linear, Plain]:
    torch.manual_seed(7)
    plain = nn.Linear(inputs, outputs, bias=case.bias, dtype=case.torch_dtype)
    lead = LEADS[case.ndim]
    x = torch.randn(*lead, inputs).to(case.torch_dtype)
    grad = torch.randn(*lead, outputs).to(case.torch_dtype)
    return plain, Plain(plain.weight, plain.bias, x, grad)


def _compare_parameters(
    layer: Any, plain: nn.Linear, want: Plain, ctx: ParallelContext, found: Findings
) -> None:
    tokens = want.x[..., 0].numel()
    weight = found.bound(want.gw_abs, tokens, 1)
    found.close(
        "weight grad",
        layer.weight.grad,
        shard_of(layer, "weight", want.gw, ctx),
        shard_of(layer, "weight", weight, ctx),
    )
    if plain.bias is not None:
        # two roundings: where tokens are cut, each rank's part is rounded before and after the sum
        bias = found.bound(want.gb_abs, tokens, 2)
        found.close(
            "bias grad",
            layer.bias.grad,
            shard_of(layer, "bias", want.gb, ctx),
            shard_of(layer, "bias", bias, ctx),
        )


def column(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp, out_spec = ctx.comm("tp"), features(case.size, case.stride)
    plain, want = _plain(case, case.size, IN_FEATURES)
    torch.manual_seed(7)
    layer = tpcore.ColumnParallelLinear(
        IN_FEATURES,
        case.size,
        case.bias,
        case.gather_output,
        case.torch_dtype,
        ctx.device,
        stride=case.stride,
        skip_bias_add=case.skip_bias_add,
        pad=True,
        **sequence(case),
    )
    compare_initial(layer, plain, ctx, found)

    x = leaf(chunk(want.x, case.seq, ctx), case, ctx)
    y = layer(x)
    if case.skip_bias_add:
        y, bias = y
        found.expect((bias is not None) == case.bias, f"skip_bias_add returned the bias {bias}")
        y = y if bias is None else y + bias
    bound = found.bound(want.y_abs, IN_FEATURES + 1, 2)
    if case.gather_output:
        found.close("output", y, want.y, bound)
        found.replicated("output", y, tp)
        y.backward(scrambled(want.grad.to(ctx.device), case.scrambled))
    else:
        found.close("output", y, cut_features(want.y, out_spec, ctx), cut_features(bound, out_spec, ctx))
        grad = cut_features(want.grad, out_spec, ctx, padding=GARBAGE)
        y.backward(scrambled(grad.to(ctx.device), case.scrambled))

    # two roundings: each rank's part to the dtype, and their sum, taken wider, to the dtype
    bound = found.bound(want.gx_abs, case.size + tp.size, 2)
    found.close("input grad", x.grad, chunk(want.gx, case.seq, ctx), chunk(bound, case.seq, ctx))
    if case.seq is None:
        found.replicated("input grad", x.grad, tp)
    _compare_parameters(layer, plain, want, ctx, found)


def row(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp, in_spec = ctx.comm("tp"), features(case.size, case.stride)
    plain, want = _plain(case, IN_FEATURES, case.size)
    torch.manual_seed(7)
    layer = tpcore.RowParallelLinear(
        case.size,
        IN_FEATURES,
        case.bias,
        case.input_is_parallel,
        case.torch_dtype,
        ctx.device,
        stride=case.stride,
        skip_bias_add=case.skip_bias_add,
        pad=True,
        reduce_output=case.reduce_output,
        **sequence(case),
    )
    compare_initial(layer, plain, ctx, found)

    x = leaf(cut_features(want.x, in_spec, ctx, GARBAGE) if case.input_is_parallel else want.x, case, ctx)
    y = layer(x)
    y, bias = y if case.skip_bias_add else (y, None)
    if not case.reduce_output:
        y = ops.reduce(y, tp, dtype=torch.float32)
    y = y if bias is None else y + bias
    # three roundings: each rank's part, their sum, and the sum with the bias
    bound = found.bound(want.y_abs, case.size + tp.size + 1, 3)
    found.close("output", y, chunk(want.y, case.seq, ctx), chunk(bound, case.seq, ctx))
    if case.seq is None:
        found.replicated("output", y, tp)
    y.backward(scrambled(chunk(want.grad, case.seq, ctx).to(ctx.device), case.scrambled))

    bound = found.bound(want.gx_abs, IN_FEATURES, 1)
    if case.input_is_parallel:
        found.close(
            "input grad", x.grad, cut_features(want.gx, in_spec, ctx), cut_features(bound, in_spec, ctx)
        )
    else:
        found.close("input grad", x.grad, want.gx, bound)
        found.replicated("input grad", x.grad, tp)
    if layer.bias is not None:
        found.replicated("bias grad", layer.bias.grad, tp)
    _compare_parameters(layer, plain, want, ctx, found)
