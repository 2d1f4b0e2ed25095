"""What passes by sharded layers whole: the rotary key of latent attention, and experts that return their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import mappings as ops
from ..comm.comm import Comm


def go_around(projection: nn.Module, attention: nn.Module, comm: Comm) -> None:
    """Sum the gradient of the rotary key, the last features of ``projection``, which the heads of all ranks share.

    The other features, the latent ones, meet a sharded layer that sums theirs (DeepSeek-V2, arXiv:2405.04434).
    """
    width: Any = getattr(attention, "qk_rope_head_dim", None)  # 0 in a layer without positions
    width = attention.config.qk_rope_head_dim if width is None else width  # type: ignore[union-attr]
    projection.register_forward_hook(_Rotary(comm, int(width)))


def share_identity(expert: nn.Module, comm: Comm) -> None:
    """Let an expert that returns its input return a rank's share of it: the outputs of all ranks are summed."""
    expert.register_forward_pre_hook(_Share(comm.size))


@dataclass(frozen=True)
class _Rotary:
    comm: Comm
    width: int

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - self.width, self.width], -1)
        return torch.cat([latent, ops.copy(rotary, self.comm, dtype=torch.float32)], -1)


@dataclass(frozen=True)
class _Share:
    ranks: int

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0] / self.ranks, *args[1:]
