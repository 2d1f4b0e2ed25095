"""Column and row linear against nn.Linear."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tpcore

from ...layout.shard import Block, ShardSpec
from ...runtime.context import ParallelContext
from .cases import Case, MatrixRow, leading
from .compare import Findings, Place, Reference
from .cutting import (
    GARBAGE,
    chunk,
    compare_gradients,
    compare_initial,
    cut_features,
    features,
    grad_of,
    leaf,
    scrambled,
    sequence,
    shard_of,
)

OTHER = 12  # features that are not cut: a column layer's inputs, a row layer's outputs
LAYERS: dict[tuple[bool, bool], Any] = {
    (True, False): tpcore.ColumnParallelLinear,
    (True, True): tpcore.layers.ColumnParallelConv1D,
    (False, False): tpcore.RowParallelLinear,
    (False, True): tpcore.layers.RowParallelConv1D,
}
"""By whether it is a column layer, and whether it is a Conv1D."""
BLOCKS = {
    "unequal": (Block(16), Block(8)),
    "uneven": (Block(6), Block(3)),
    "heads": (Block(12, 3), Block(6, 3)),
    "copies": (Block(8), Block(4, 4, replicate=True), Block(4, 2, replicate=True)),
}
"""By name; the two units of "copies" are one where an odd number of ranks cannot have copies of two."""


class _PlainConv1D(nn.Module):
    """transformers' Conv1D: a linear layer whose weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(inputs, outputs, dtype=dtype), std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def _conv(case: Case) -> bool:
    return case.layer.endswith("conv1d")


def _cut(case: Case, n: int) -> tuple[ShardSpec, Any]:
    """The spec of the cut features, and the layer's option ``blocks`` for it."""
    options = dict(case.options)
    if isinstance(options["blocks"], int):
        return features(case.size, options["blocks"]), options["blocks"]
    blocks = BLOCKS[case.blocks]
    if n > 1 and n % 2 and case.blocks == "copies":
        blocks = (*blocks[:2], Block(4, 4, replicate=True))
    return ShardSpec((sum(b.size for b in blocks),), 0, blocks), blocks


def _compare(
    layer: Any,
    plain: Any,
    case: Case,
    places: tuple[Place, Place],
    sends: tuple[Place, Place],
    roundings: tuple[tuple[int, int], tuple[int, int]],
    ctx: ParallelContext,
    found: Findings,
) -> None:
    """The output and all gradients. ``places``: this rank's parts of the input and of the output; ``sends``: what it
    is given of the input and of the output's gradient; ``roundings``: of the output and of the input's gradient."""
    tp, lead = ctx.comm("tp"), leading(case, ctx)
    compare_initial(layer, plain, ctx, found)
    data = torch.randn(*lead, layer.in_features).to(case.torch_dtype)
    grad = torch.randn(*lead, layer.out_features).to(case.torch_dtype)
    if _conv(case):  # whose bias starts at zero
        plain.bias.data.normal_()
        layer.bias.data.copy_(shard_of(layer, "bias", plain.bias.detach(), ctx))
    exact, sizes = (Reference(plain, lambda m, x: [m(x)], data, [grad], of) for of in (torch.clone, torch.abs))

    x = leaf(sends[0](data), case, ctx)
    y = layer(x)
    if ("skip_bias_add", True) in case.options:
        y, bias = y
        found.expect((bias is not None) == case.bias, f"skip_bias_add returned the bias {bias}")
        y = y if bias is None else y + bias
    found.part("output", y, (exact.outs[0], sizes.outs[0]), roundings[0], places[1], tp)
    y.backward(scrambled(sends[1](grad).to(ctx.device), case.scrambled))
    found.part("input grad", x.grad, (grad_of(exact.x), grad_of(sizes.x)), roundings[1], places[0], tp)

    def rounded(name: str) -> int:
        # ranks with the same part round their shares of a weight's gradient, and then the sum; if tokens are cut,
        # each rank's part of the bias' gradient is rounded before and after the sum
        return 2 if layer.copies or name == "bias" else 1

    tokens = data[..., 0].numel()
    compare_gradients(layer, exact.module, sizes.module, tokens + 4, rounded, ctx, found)


def linear(ctx: ParallelContext, case: Case, found: Findings) -> None:
    n, column = ctx.comm("tp").size, case.layer.startswith("column")
    spec, blocks = _cut(case, n)
    (size,) = spec.shape
    inputs, outputs = (OTHER, size) if column else (size, OTHER)
    torch.manual_seed(7)
    if _conv(case):
        plain: nn.Module = _PlainConv1D(inputs, outputs, case.torch_dtype)
    else:
        plain = nn.Linear(inputs, outputs, bias=case.bias, dtype=case.torch_dtype)
    torch.manual_seed(7)
    layer = LAYERS[column, _conv(case)](
        inputs,
        outputs,
        case.bias,
        case.gather_output if column else case.input_is_parallel,
        case.torch_dtype,
        ctx.device,
        skip_bias_add=("skip_bias_add", True) in case.options,
        pad=True,
        blocks=blocks,
        **sequence(case),
    )

    def share(grad: Tensor) -> Tensor:
        """This rank's part: 1 / the number of ranks that compute an output, of its gradient."""
        copies = zip(spec.blocks, spec.block_copies(n), strict=True)
        shares = torch.cat([torch.full((block.size,), 1 / times) for block, times in copies])
        return part(grad * shares.to(grad.dtype), padding=GARBAGE)

    tokens, part = partial(chunk, dim=case.seq, ctx=ctx), partial(cut_features, spec=spec, ctx=ctx)
    whole = case.gather_output if column else not case.input_is_parallel
    sharded: Place = (lambda t: t) if whole else part
    sent: Place = sharded if whole else share if column else partial(part, padding=GARBAGE)
    if column:
        # two roundings to the dtype: of each rank's part, and of their sum, which is computed in a wider dtype
        roundings = (OTHER + 1, 2), (2 * size + n, 2)
        _compare(layer, plain, case, (tokens, sharded), (tokens, sent), roundings, ctx, found)
        return
    # three roundings: of each rank's part, of their sum, and of the sum with the bias
    roundings = (size + n + 1, 3), (OTHER, 1)
    _compare(layer, plain, case, (sharded, tokens), (sent, tokens), roundings, ctx, found)
    if layer.bias is not None:
        found.replicated("bias grad", layer.bias.grad, ctx.comm("tp"))


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
    linear,
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
    linear,
    _row_accepts,
)
COLUMN_BLOCKS = MatrixRow(
    "column blocks",
    tpcore.ColumnParallelLinear,
    {"seq": (None, 1), "bias": (True,), "gather_output": (True, False), "blocks": tuple(BLOCKS)},
    linear,
)
ROW_BLOCKS = MatrixRow(
    "row blocks",
    tpcore.RowParallelLinear,
    {"seq": (None, 1), "bias": (True,), "input_is_parallel": (True, False), "blocks": tuple(BLOCKS)[:3]},
    linear,
    _row_accepts,
)
COLUMN_CONV1D = MatrixRow(
    "column conv1d",
    tpcore.layers.ColumnParallelConv1D,
    {"seq": (None, 1), "bias": (True,), "gather_output": (True, False), **SIZES},
    linear,
)
ROW_CONV1D = MatrixRow(
    "row conv1d",
    tpcore.layers.RowParallelConv1D,
    {"seq": (None, 1), "bias": (True,), "input_is_parallel": (True, False), **SIZES},
    linear,
    _row_accepts,
)
