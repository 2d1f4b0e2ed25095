"""Norms for sequence-parallel regions: their weights are replicated, and each rank has part of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm import mappings as ops
from ..layout.shard import ShardSpec
from .adopt import checked_plain, filled
from .module import ParallelModule

Norm = TypeVar("Norm", bound="LayerNorm")
RMS = TypeVar("RMS", bound="RMSNorm")


class _Norm(ParallelModule):
    def __init__(self, shape: int | Sequence[int], eps: float | None, sequence_parallel: bool, group: Any) -> None:
        super().__init__(group)
        self.normalized_shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps, self.sequence_parallel = eps, sequence_parallel
        if sequence_parallel and self.reproducible is not None:
            raise ValueError(
                f"{type(self).__name__}(sequence_parallel=True) knows no dim of the tokens, which reproducible="
                f"{self.reproducible} adds in blocks: leave it out"
            )

    def _whole(self, parameter: Tensor | None) -> Tensor | None:
        """The parameter for use on this rank's tokens. Backward sums its gradient over all ranks' tokens."""
        if parameter is None or not self.sequence_parallel:
            return parameter
        return ops.copy(parameter, self.tp, dtype=torch.float32)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class LayerNorm(_Norm):
    """``nn.LayerNorm`` whose parameters get complete gradients if the tokens are spread over the tp group.

    ``sequence_parallel``: they are. It normalizes the last dims, so the tokens may be along any other dim.
    """

    plain_type = nn.LayerNorm
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        sequence_parallel: bool = False,
        group: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, sequence_parallel, group)
        for name, enabled, init in (("weight", True, nn.init.ones_), ("bias", bias, nn.init.zeros_)):
            if elementwise_affine and enabled:
                self.shard_parameter(name, ShardSpec(self.normalized_shape), init, dtype, device)
            else:
                self.register_parameter(name, None)

    @classmethod
    def from_plain(cls: type[Norm], plain: nn.Module, **options: Any) -> Norm:
        """The same norm as an ``nn.LayerNorm``. Works like ``ColumnParallelLinear.from_plain``."""
        norm = checked_plain(plain, nn.LayerNorm, cls)
        affine, bias = norm.weight is not None, norm.bias is not None
        arguments = {"dtype": norm.weight.dtype} if affine else {}
        return filled(cls(norm.normalized_shape, norm.eps, affine, bias, "meta", **arguments, **options), plain)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._whole(self.weight), self._whole(self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps or 0.0)


class RMSNorm(_Norm):
    """``nn.RMSNorm`` whose weight gets complete gradients if the tokens are spread over the tp group.

    ``eps=None`` is ``torch.finfo(x.dtype).eps``, as in torch. ``sequence_parallel`` as in ``LayerNorm``.
    """

    plain_type = nn.RMSNorm
    weight: Tensor

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
        group: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, sequence_parallel, group)
        self.shard_parameter("weight", ShardSpec(self.normalized_shape), nn.init.ones_, dtype, device)

    @classmethod
    def from_plain(cls: type[RMS], plain: nn.Module, **options: Any) -> RMS:
        """The same norm as an ``nn.RMSNorm``. Works like ``ColumnParallelLinear.from_plain``."""
        norm = checked_plain(plain, nn.RMSNorm, cls)
        if norm.weight is None:
            raise ValueError(f"{cls.__name__}.from_plain: {norm} has no weight, and this layer always has one")
        return filled(cls(norm.normalized_shape, norm.eps, dtype=norm.weight.dtype, device="meta", **options), plain)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self._whole(self.weight), self.eps)
