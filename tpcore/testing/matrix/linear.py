"""Column and row linear against nn.Linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...layout.shard import Block, ShardSpec
from ...runtime.context import ParallelContext
from .cases import LEADS, Case, MatrixRow
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
BLOCKS = {
    "unequal": (Block(16), Block(8)),
    "uneven": (Block(6), Block(3)),
    "heads": (Block(12, 3), Block(6, 3)),
    "copies": (Block(8), Block(4, 4, replicate=True), Block(4, 2, replicate=True)),
}


@dataclass
class Plain:
    """The plain module's results in float64, and each result computed from absolute values."""

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


class _PlainConv1D(nn.Module):
    """transformers' Conv1D: a linear layer whose weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(inputs, outputs, dtype=dtype), std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype))


def _conv(case: Case) -> bool:
    return case.layer.endswith("conv1d")


def _plain(case: Case, inputs: int, outputs: int) -> Any:
    torch.manual_seed(7)
    if _conv(case):
        return _PlainConv1D(inputs, outputs, case.torch_dtype)
    return nn.Linear(inputs, outputs, bias=case.bias, dtype=case.torch_dtype)


def _given(case: Case, plain: Any, layer: Any, ctx: ParallelContext) -> Plain:
    """Input and output gradient, drawn after the layers are made; a bias that starts at zero gets values."""
    lead, kind = LEADS[case.ndim], case.torch_dtype
    weight = plain.weight.t() if _conv(case) else plain.weight
    outputs, inputs = weight.shape
    x, grad = torch.randn(*lead, inputs).to(kind), torch.randn(*lead, outputs).to(kind)
    if _conv(case):
        plain.bias.data.normal_()
        layer.bias.data.copy_(shard_of(layer, "bias", plain.bias.detach(), ctx))
    return Plain(weight, plain.bias, x, grad)


def _compare_parameters(layer: Any, case: Case, want: Plain, ctx: ParallelContext, found: Findings) -> None:
    tokens = want.x[..., 0].numel()
    # ranks with the same part round their shares of its gradient, and then the sum
    weight = found.bound(want.gw_abs, tokens + 4, 2 if layer.copies else 1)
    exact = want.gw
    if _conv(case):
        exact, weight = exact.t(), weight.t()
    found.close(
        "weight grad",
        layer.weight.grad,
        shard_of(layer, "weight", exact, ctx),
        shard_of(layer, "weight", weight, ctx),
    )
    if layer.bias is not None:
        # two roundings: if tokens are cut, each rank's part is rounded before and after the sum
        bias = found.bound(want.gb_abs, tokens + 4, 2)
        found.close(
            "bias grad",
            layer.bias.grad,
            shard_of(layer, "bias", want.gb, ctx),
            shard_of(layer, "bias", bias, ctx),
        )


def _cut(case: Case) -> tuple[ShardSpec, dict[str, Any]]:
    """The spec of the cut features, and the layer's option for it."""
    options = dict(case.options)
    if isinstance(options["blocks"], int):
        return features(case.size, options["blocks"]), {"blocks": options["blocks"]}
    blocks = BLOCKS[case.blocks]
    return ShardSpec((sum(b.size for b in blocks),), 0, blocks), {"blocks": blocks}


def _shares(spec: ShardSpec, n: int) -> Tensor:
    """For each output, 1 / the number of ranks that compute it: one rank's share of its gradient."""
    counts = zip(spec.blocks, spec.block_copies(n), strict=True)
    return torch.cat([torch.full((block.size,), 1 / copies) for block, copies in counts])


def column(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp, (out_spec, cut) = ctx.comm("tp"), _cut(case)
    (size,), skip_bias_add = out_spec.shape, ("skip_bias_add", True) in case.options
    plain = _plain(case, IN_FEATURES, size)
    torch.manual_seed(7)
    make = tpcore.layers.ColumnParallelConv1D if _conv(case) else tpcore.ColumnParallelLinear
    layer = make(
        IN_FEATURES,
        size,
        case.bias,
        case.gather_output,
        case.torch_dtype,
        ctx.device,
        skip_bias_add=skip_bias_add,
        pad=True,
        **cut,
        **sequence(case),
    )
    compare_initial(layer, plain, ctx, found)
    want = _given(case, plain, layer, ctx)

    x = leaf(chunk(want.x, case.seq, ctx), case, ctx)
    y = layer(x)
    if skip_bias_add:
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
        shares = _shares(out_spec, tp.size).to(want.grad.dtype)
        grad = cut_features(want.grad * shares, out_spec, ctx, padding=GARBAGE)
        y.backward(scrambled(grad.to(ctx.device), case.scrambled))

    # two roundings to the dtype: of each rank's part, and of their sum, which is computed in a wider dtype
    bound = found.bound(want.gx_abs, 2 * size + tp.size, 2)
    found.close("input grad", x.grad, chunk(want.gx, case.seq, ctx), chunk(bound, case.seq, ctx))
    if case.seq is None:
        found.replicated("input grad", x.grad, tp)
    _compare_parameters(layer, case, want, ctx, found)


def row(ctx: ParallelContext, case: Case, found: Findings) -> None:
    tp, (in_spec, cut) = ctx.comm("tp"), _cut(case)
    (size,), options = in_spec.shape, dict(case.options)
    skip_bias_add = options.get("skip_bias_add", False)
    plain = _plain(case, size, IN_FEATURES)
    torch.manual_seed(7)
    make = tpcore.layers.RowParallelConv1D if _conv(case) else tpcore.RowParallelLinear
    layer = make(
        size,
        IN_FEATURES,
        case.bias,
        case.input_is_parallel,
        case.torch_dtype,
        ctx.device,
        skip_bias_add=skip_bias_add,
        pad=True,
        **cut,
        **sequence(case),
    )
    compare_initial(layer, plain, ctx, found)
    want = _given(case, plain, layer, ctx)

    x = leaf(cut_features(want.x, in_spec, ctx, GARBAGE) if case.input_is_parallel else want.x, case, ctx)
    y = layer(x)
    y, bias = y if skip_bias_add else (y, None)
    y = y if bias is None else y + bias
    # three roundings: of each rank's part, of their sum, and of the sum with the bias
    bound = found.bound(want.y_abs, size + tp.size + 1, 3)
    found.close("output", y, chunk(want.y, case.seq, ctx), chunk(bound, case.seq, ctx))
    if case.seq is None:
        found.replicated("output", y, tp)
    y.backward(scrambled(chunk(want.grad, case.seq, ctx).to(ctx.device), case.scrambled))

    bound = found.bound(want.gx_abs, IN_FEATURES, 1)
    if case.input_is_parallel:
        found.close("input grad", x.grad, cut_features(want.gx, in_spec, ctx), cut_features(bound, in_spec, ctx))
    else:
        found.close("input grad", x.grad, want.gx, bound)
        found.replicated("input grad", x.grad, tp)
    if layer.bias is not None:
        found.replicated("bias grad", layer.bias.grad, tp)
    _compare_parameters(layer, case, want, ctx, found)


def _row_accepts(o: dict[str, Any]) -> bool:
    return o["seq"] is None or bool(o["input_is_parallel"])


# sizes: an even one, and one of which the last rank at tp=4 has only padding
SIZES = {"size": (24, 9), "blocks": (1, 3)}
COLUMN = MatrixRow(
    "column",
    tpcore.ColumnParallelLinear,
    {
        "seq": (None, 0, 1),
        "bias": (True, False),
        "gather_output": (True, False),
        "skip_bias_add": (False, True),
        **SIZES,
    },
    column,
)
ROW = MatrixRow(
    "row",
    tpcore.RowParallelLinear,
    {
        "seq": (None, 0, 1),
        "bias": (True, False),
        "input_is_parallel": (True, False),
        "skip_bias_add": (False, True),
        **SIZES,
    },
    row,
    _row_accepts,
)
COLUMN_BLOCKS = MatrixRow(
    "column blocks",
    tpcore.ColumnParallelLinear,
    {"seq": (None, 1), "bias": (True,), "gather_output": (True, False), "blocks": tuple(BLOCKS)},
    column,
)
ROW_BLOCKS = MatrixRow(
    "row blocks",
    tpcore.RowParallelLinear,
    {"seq": (None, 1), "bias": (True,), "input_is_parallel": (True, False), "blocks": tuple(BLOCKS)[:3]},
    row,
    _row_accepts,
)
COLUMN_CONV1D = MatrixRow(
    "column conv1d",
    tpcore.layers.ColumnParallelConv1D,
    {"seq": (None, 1), "bias": (True,), "gather_output": (True, False), **SIZES},
    column,
)
ROW_CONV1D = MatrixRow(
    "row conv1d",
    tpcore.layers.RowParallelConv1D,
    {"seq": (None, 1), "bias": (True,), "input_is_parallel": (True, False), **SIZES},
    row,
    _row_accepts,
)
