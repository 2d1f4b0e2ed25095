"""Column and row linear, and projections of query, key and value with shared heads, against nn.Linear."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

import tpcore

from ...layout.shard import Block, ShardSpec
from ..kit.samples import multiple
from .cells import GARBAGE, Cell, MatrixRow, Place, Reference, grad_of

OTHER = 12  # features that are not sharded: a column layer's inputs, a row layer's outputs
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


def _cut(c: Cell) -> tuple[ShardSpec, Any]:
    """The spec of the cut features, and the layer's option ``blocks`` for it."""
    named = c.case.blocks
    if isinstance(named, int):
        return ShardSpec.strided((c.case.size,), 0, named), named
    blocks = BLOCKS[named]
    if c.size > 1 and c.size % 2 and named == "copies":
        blocks = (*blocks[:2], Block(4, 4, replicate=True))
    return ShardSpec((sum(b.size for b in blocks),), 0, blocks), blocks


def _compare(
    c: Cell,
    layer: Any,
    plain: Any,
    places: tuple[Place, Place],
    sends: tuple[Place, Place],
    roundings: tuple[tuple[int, int], tuple[int, int]],
    times: Tensor | int = 1,
) -> None:
    """The output and all gradients. ``places``: this rank's parts of the input and of the output; ``sends``: what it
    is given of the input and of the output's gradient; ``roundings``: of the output and of the input's gradient.
    ``times``: how many ranks compute an output, each of which sends a share of its gradient. The whole of it is a
    multiple of the shares, and not they parts of it: a third is not a number of any dtype."""
    c.initial(layer, plain)
    data = torch.randn(*c.lead, layer.in_features).to(c.dtype)
    grad = torch.randn(*c.lead, layer.out_features).to(c.dtype)
    if isinstance(plain, _PlainConv1D):  # whose bias starts at zero
        plain.bias.data.normal_()
        layer.bias.data.copy_(c.shard_of(layer, "bias", plain.bias.detach()))
    exact, sizes = (
        Reference(plain, lambda m, x: [m(x)], data, [grad.double() * times], of) for of in (torch.clone, torch.abs)
    )

    x = c.leaf(sends[0](data))
    y = layer(x)
    if c.case.get("skip_bias_add"):
        y, bias = y
        c.expect((bias is not None) == c.case.bias, f"skip_bias_add returned the bias {bias}")
        y = y if bias is None else y + bias
    c.part("output", y, (exact.outs[0], sizes.outs[0]), roundings[0], places[1])
    y.backward(c.placed(sends[1](grad)))
    c.part("input grad", x.grad, (grad_of(exact.x), grad_of(sizes.x)), roundings[1], places[0])

    def rounded(name: str) -> int:
        # ranks with the same part round their shares of a weight's gradient, and then the sum; if tokens are sharded,
        # each rank's part of the bias' gradient is rounded before and after the sum
        return 2 if layer.copies or name == "bias" else 1

    c.gradients(layer, exact.module, sizes.module, data[..., 0].numel() + 4, rounded)


def linear(c: Cell) -> None:
    case, (spec, blocks) = c.case, _cut(c)
    column, conv = case.layer.startswith("column"), case.layer.endswith("conv1d")
    (size,) = spec.shape
    inputs, outputs = (OTHER, size) if column else (size, OTHER)
    torch.manual_seed(7)
    kind: Any = _PlainConv1D if conv else partial(nn.Linear, bias=case.bias)
    plain = kind(inputs, outputs, dtype=c.dtype)
    torch.manual_seed(7)
    layer = LAYERS[column, conv](
        inputs,
        outputs,
        case.bias,
        case.gather_output if column else case.input_is_parallel,
        c.dtype,
        c.ctx.device,
        skip_bias_add=bool(case.get("skip_bias_add")),
        pad=True,
        blocks=blocks,
        **c.sequence,
    )

    part = partial(c.features, spec=spec)
    whole = case.gather_output if column else not case.input_is_parallel
    sharded: Place = (lambda t: t) if whole else part
    sent: Place = sharded if whole else partial(part, padding=GARBAGE)
    if column:
        # two roundings to the dtype: of each rank's part, and of their sum, which is computed in a wider dtype
        roundings = (OTHER + 1, 2), (2 * size + c.size, 2)
        copies = zip(spec.blocks, spec.block_copies(c.size), strict=True)
        times = torch.cat([torch.full((block.size,), 1 if whole else n) for block, n in copies])
        _compare(c, layer, plain, (c.tokens, sharded), (c.tokens, sent), roundings, times)
        return
    # three roundings: of each rank's part, of their sum, and of the sum with the bias
    roundings = (size + c.size + 1, 3), (OTHER, 1)
    _compare(c, layer, plain, (sharded, c.tokens), (sent, c.tokens), roundings)
    if layer.bias is not None:
        c.replicated("bias grad", layer.bias.grad)


def _row(name: str, **axes: tuple[Any, ...]) -> MatrixRow:
    column = name.startswith("column")
    way = "gather_output" if column else "input_is_parallel"
    axes = {"seq": (None, 1), "bias": (True,), way: (True, False), **axes}
    layer = LAYERS[column, name.endswith("conv1d")]
    return MatrixRow(name, layer, axes, linear, lambda o: o["seq"] is None or bool(o.get("input_is_parallel", True)))


# sizes: an even one, and one of which the last rank at tp=4 has only padding
SIZES = {"size": (24, 9), "blocks": (1, 3)}
ALL = {"seq": (None, 0, 1), "bias": (True, False), "skip_bias_add": (False, True), **SIZES}
COLUMN, ROW = _row("column", **ALL), _row("row", **ALL)
COLUMN_BLOCKS = _row("column blocks", blocks=tuple(BLOCKS))
ROW_BLOCKS = _row("row blocks", blocks=tuple(BLOCKS)[:3])
COLUMN_CONV1D, ROW_CONV1D = _row("column conv1d", **SIZES), _row("row conv1d", **SIZES)

HIDDEN, HEAD = 12, 3


def _outputs(heads: int, plain: nn.Module, x: Tensor) -> list[Tensor]:
    """q, k and v, with k and v repeated for each query head."""
    out = torch.cat([layer(x) for layer in plain.children()], -1)
    q, k, v = out.split([heads * HEAD, *[(out.shape[-1] - heads * HEAD) // 2] * 2], -1)
    return [q, _repeated(k, heads), _repeated(v, heads)]


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each key or value head for the query heads that share it; then it is sharded like those."""
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
