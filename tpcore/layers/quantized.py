"""Frozen linear weights of eight bits, with a float32 scale for each output channel.

``w ~ weight * weight_scale[:, None]``, symmetric, the largest entry of a channel at the end of the range: weight-only
quantization as in Dettmers et al. 2022, arXiv:2208.07339, section 2, without its outliers. The scale of a channel is
of the whole channel, also where each rank has some of its entries, so that every degree is the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm import mappings as ops
from ..layout.shard import ShardSpec
from .module import ParallelModule

DTYPES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of a quantized weight, with their largest values."""
_FEW_ROWS = 16
"""Up to which torch's integer kernel is faster. 2048 x 2048, one thread, bfloat16: 0.26 ms against 0.95 for one row,
0.85 against 1.08 for 16, 1.64 against 1.35 for 32; in float32 it is slower at any number."""
_ENTRIES = 2**24  # quantized at a time: what is computed for them takes 64 MB twice


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"quantize={dtype}: weights are quantized to {' or '.join(map(str, DTYPES))}")


def quantized(weight: Tensor, dtype: torch.dtype, largest: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """``weight`` [out, in] in ``dtype``, and the scale [out]. ``largest``: over the ranks, of each channel."""
    top = largest(weight.abs().amax(1).float())
    scale = top.clamp(min=1e-12) / DTYPES[dtype]
    entries = torch.empty_like(weight, dtype=dtype)
    count = max(1, _ENTRIES // weight.shape[1])
    for rows, scales, out in zip(weight.split(count), scale.split(count), entries.split(count), strict=True):
        values = rows.float() / scales[:, None]
        out.copy_(values.round_() if dtype is torch.int8 else values)
    return entries, scale


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's integer kernel is there for the dtypes and sizes: it reads past the end of other ones."""
    dtypes = x.dtype, weight.dtype
    return dtypes == (torch.bfloat16, torch.int8) and not (weight.shape[0] % 64 or weight.shape[1] % 64)


def _product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    if x.dtype is torch.float16:  # the products without scales would leave its range
        return F.linear(x, (weight.float() * scale[:, None]).to(x.dtype))
    rows = x.numel() // x.shape[-1]
    if 0 < rows <= _FEW_ROWS and x.device.type == "cpu" and _takes(x, weight):
        y: Tensor = torch._weight_int8pack_mm(x.reshape(rows, -1), weight, scale.to(x.dtype))
        return y.view(*x.shape[:-1], len(weight))
    return (F.linear(x, weight.to(x.dtype)) * scale).to(x.dtype)


class _Product(torch.autograd.Function):
    """Keeps the weight in eight bits for backward, instead of what it became for the matmul."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return _product(x, weight, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return (grad * scale).to(grad.dtype) @ weight.to(grad.dtype), None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """``F.linear`` with a quantized weight, in the dtype of ``x`` or of autocast."""
    if weight.dtype not in DTYPES:
        raise ValueError(f"a quantized weight has become {weight.dtype}: adapters are not merged into such weights")
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    y: Tensor = (_product if ops.transformed() else _Product.apply)(x, weight, scale)
    return y if bias is None else y + bias.to(y.dtype)


def _unchanged(module: Any, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of ``module._apply``, which moves a quantized weight and changes the dtype of all others only."""
    scale = module._parameters.get("weight_scale")
    if scale is None:
        return fn
    frozen = module.weight, scale

    def run(t: Tensor) -> Tensor:
        moved = fn(t)
        changed = moved.dtype is not t.dtype and any(t is p for p in frozen)
        return t.to(moved.device) if changed else moved

    return run


class QuantizableLinear(ParallelModule):
    """A sharded linear layer, whose weight may be quantized."""

    weight: Tensor
    weight_scale: Tensor | None
    gather_output, input_is_parallel = True, False

    @property
    def sides(self) -> tuple[Any, Any]:
        features: Any = self.features
        return features if self.input_is_parallel else None, None if self.gather_output else features

    def quantize(self, dtype: torch.dtype) -> None:
        """Replace the weight, frozen, by ``weight`` in ``dtype`` and ``weight_scale``. Collective over the group."""
        by_rows = self._declare_scale()
        alone = by_rows or self.tp.size == 1 or self.weight.is_meta
        freeze(self, dtype, (lambda t: t) if alone else lambda t: self.tp.all_reduce(t, "max"))

    def take(self, weight: Tensor, scale: Tensor) -> None:
        """Replace the weight, frozen, by this rank's part of a quantized ``weight`` [out, in] and ``scale`` [out]."""
        self._declare_scale()
        for name, full in (("weight", weight), ("weight_scale", scale)):
            self.register_parameter(name, nn.Parameter(self.part_of(name, full), requires_grad=False))

    def _declare_scale(self) -> bool:
        """Whether the weight, and so its scale, is sharded by output channels."""
        cut = self.shard_specs["weight"]
        scale = ShardSpec(cut.shape[:1], 0, cut.blocks) if cut.dim == 0 else ShardSpec(cut.shape[:1])
        self.shard_specs["weight_scale"] = scale
        self._inits["weight"] = self._inits["weight_scale"] = _no_values
        return cut.dim == 0

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear`` on this rank."""
        scale = self.weight_scale
        return F.linear(x, weight, bias) if scale is None else linear(x, weight, bias, scale)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizableLinear:
        super()._apply(_unchanged(self, fn), recurse)
        return self


class QuantizedLinear(nn.Linear):
    """A whole linear layer with a quantized weight."""

    weight_scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.weight_scale)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        super()._apply(_unchanged(self, fn), recurse)
        return self


@torch.no_grad()
def freeze(module: Any, dtype: torch.dtype, largest: Callable[[Tensor], Tensor] = lambda t: t) -> None:
    """Put the quantized weight of ``module`` and its scale in place."""
    hold(module, *quantized(module.weight, dtype, largest))


def hold(module: nn.Module, weight: Tensor, scale: Tensor) -> None:
    module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    module.register_parameter("weight_scale", nn.Parameter(scale, requires_grad=False))


def _no_values(_: Tensor) -> Tensor:
    raise ValueError("a quantized layer has no initial values: load them")
