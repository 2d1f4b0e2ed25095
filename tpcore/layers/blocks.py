"""Products of sharded linear layers that have the same bits at every degree.

A job with ``reproducible`` computes what so many ranks would, each rank the blocks of several: a product of a block has
the same sizes and the same place in memory at every degree, for a library of matrices chooses its order of addition by
these, and the blocks' sums are added in one tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import mappings as ops
from ..comm.blocks import COPIES, CommSpec, copies, total
from ..layout.shard import ShardSpec
from .fused import Fused, autocasted, column_linear, row_linear
from .module import ParallelModule

ALIGNED, _LANES = 64, 128
"""Bytes of a cache line, and of what torch's vectorized functions compute at once: what is left over at the end of a
tensor goes another way, which rounds otherwise (SiLU: one entry in 26)."""


def aligned(t: Tensor) -> Tensor:
    """``t`` contiguous, from the beginning of a cache line on."""
    t = t.contiguous()
    return t.clone() if t.device.type == "cpu" and t.data_ptr() % ALIGNED else t


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, weight, bias = autocasted(x.flatten(0, -2), weight, bias, x.device.type)
    # copies are made outside of it, for a second derivative goes through what it keeps
    y: Tensor = _OfBlock.apply(aligned(rows), aligned(weight), bias)
    return y.view(*x.shape[:-1], len(weight))


def products(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` of batches of matrices, each of which has the bits that it has alone, whatever their layout."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    rows, columns = (t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in (x, y.mT))
    of_each = [_product(*matrices, None) for matrices in zip(rows, columns, strict=True)]
    return torch.stack(of_each).view(*batch, x.shape[-2], y.shape[-1]) if of_each else x @ y


class _OfBlock(torch.autograd.Function):
    """``F.linear`` of matrices, whose gradients are products of such matrices too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grad = ctx.saved_tensors, aligned(grad)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            grad.mm(weight) if needs_x else None,
            grad.t().mm(x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def check_divides(layer: ParallelModule, cut: ShardSpec) -> int | None:
    """The number of blocks in which a ``reproducible`` job computes with ``layer``, or None. ValueError for sizes along
    the sharded dim that are not so many equal ones."""
    if (most := layer.reproducible) is None:
        return None
    for size in (block.size for block in cut.blocks if block.size % most):
        raise ValueError(
            f"{type(layer).__name__}: {size} of {cut.shape} are not {most} equal blocks, in which reproducible={most} "
            f"computes: pad them to {-(-size // most) * most}, or pass a smaller number, the largest degree you need"
        )
    return most


@dataclass(frozen=True)
class InBlocks:
    """The products of one layer. ``sizes``: of the parts that a rank has of the fused projections along its sharded
    features; ``layer``: its name in errors."""

    layer: str
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layer: ParallelModule, cut: ShardSpec) -> InBlocks | None:
        """Of a layer whose features are sharded as ``cut``; None where it is not ``reproducible``. ValueError for
        features that do not divide, or that several ranks have."""
        n, most, name = layer.tp.size, check_divides(layer, cut), type(layer).__name__
        if most is None:
            return None
        if (many := max(cut.block_copies(n), default=1)) > 1:
            raise ValueError(
                f"{name}: {many} of tp={n} ranks have the same features, such as a key/value head, whose "
                f"gradients would be added in another order: with reproducible={most} take tp up to {n // many}"
            )
        return cls(name, tuple(block.size // n for block in cut.blocks))

    def column(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec, scale: Tensor | None = None
    ) -> Tensor:
        """As ``fused.column_linear``: each block of outputs by itself."""
        n = spec[0].blocks or 1
        halves = len(self.sizes) == 2 and self.sizes[0] == self.sizes[1]  # such as gate|up, each of which is a view
        self._check(self.sizes[0] // n if halves else 0, x, scale)
        xs = getattr(x, COPIES, None) or copies(x, spec)
        weights = [w for part in self._split(weight, 0) for w in part.chunk(n)]
        biases = cycle([None]) if bias is None else [b for part in self._split(bias, 0) for b in part.chunk(n)]
        return torch.cat([_product(*block) for block in zip(cycle(xs), weights, biases, strict=False)], -1)

    def row(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: CommSpec, scale: Tensor | None = None
    ) -> Tensor:
        """As ``fused.row_linear``: the sum over each block of inputs by itself."""
        comm, seq, _ = spec
        n = comm.blocks or 1
        self._check(x.numel() // n, x, scale)
        parts = [_product(*block, None) for block in zip(self._blocks(x, n), self._blocks(weight, n), strict=True)]
        y = total(parts, spec)
        if bias is None:
            return y
        # of all tokens, so that its gradient is one sum over them
        return y + (bias if seq is None else ops.scatter(bias.expand(parts[0].shape), comm, seq))

    def _blocks(self, t: Tensor, n: int) -> Iterator[Tensor]:
        """The ``n`` blocks of ``t`` along its last dim, each with its part of every projection."""
        for parts in zip(*(part.chunk(n, -1) for part in self._split(t, -1)), strict=True):
            yield parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _split(self, t: Tensor, dim: int) -> Sequence[Tensor]:
        # not of one part: its backward copies the gradient
        return t.split(self.sizes, dim) if len(self.sizes) > 1 else (t,)

    def _check(self, entries: int, x: Tensor, scale: Tensor | None) -> None:
        """ValueError for a quantized weight, and unless whole vectors have the ``entries`` of a block."""
        if scale is not None:
            raise ValueError(f"{self.layer}: reproducible= has no products of quantized weights: leave out quantize=")
        if entries * x.itemsize % _LANES:
            raise ValueError(
                f"{self.layer}: a block of an input of shape {tuple(x.shape)} has {entries} entries, and reproducible= "
                f"takes multiples of {_LANES // x.itemsize} in {x.dtype}, for which functions such as SiLU round alike "
                "at every degree: pad the batch or the features, or pass a smaller number"
            )


def linear_of(layer: ParallelModule, cut: ShardSpec, side: int) -> Fused:
    """How a layer multiplies: ``cut`` by output features (``side`` 0) or by input features (1)."""
    in_blocks = InBlocks.of(layer, cut)
    if in_blocks is None:
        return row_linear if side else column_linear
    return in_blocks.row if side else in_blocks.column
