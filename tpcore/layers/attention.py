"""Query, key and value projections of one input, sharded by whole heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..layout.shard import Block
from ..runtime.context import current
from .initial import Init
from .linear import ColumnParallelLinear
from .module import Device
from .plain import checked_plain, filled
from .shared_input import InputCopy

QKV = TypeVar("QKV", bound="ParallelQKV")


class ParallelQKV(nn.Module):
    """Computes ``(q, k, v)`` of one input. Each rank computes whole heads.

    Input ``[..., hidden_size]``, the same on every rank (with sequence parallelism: this rank's chunk along
    ``sequence_dim``). Outputs ``[..., local_heads * head_dim]`` and twice ``[...,
    local_kv_heads * head_dim]``: this rank's query heads, and the key and value heads that they attend to. If
    tp exceeds ``num_kv_heads``, consecutive ranks hold the same key and value head (rank r holds head
    ``r // copies``), and the gradients of its weights are summed over these ranks.

    The weights are ``q_proj``, ``k_proj`` and ``v_proj``, or with ``fused`` one ``qkv_proj`` with q|k|v along
    its output. In both cases the input's gradient is all-reduced once. ValueError if tp would split a head.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        *,
        fused: bool = False,
        init_method: Init | None = None,
        sequence_dim: int | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        group: Any = None,
    ) -> None:
        super().__init__()
        comm = current().comm_for(group)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _head_dim(hidden_size, num_heads) if head_dim is None else head_dim
        _check_heads(num_heads, num_kv_heads, comm.size)
        self.local_heads, self.local_kv_heads = num_heads // comm.size, max(1, num_kv_heads // comm.size)
        self.copy = InputCopy(comm, sequence_dim, reduce_dtype)
        kv = Block(num_kv_heads * self.head_dim, self.head_dim, replicate=True)
        blocks = (Block(num_heads * self.head_dim, self.head_dim), kv, kv)
        parts = {"qkv_proj": blocks} if fused else {f"{n}_proj": (b,) for n, b in zip("qkv", blocks, strict=True)}
        for name, cut in parts.items():
            size = sum(block.size for block in cut)
            projection = ColumnParallelLinear(
                hidden_size,
                size,
                bias,
                False,
                dtype,
                device,
                blocks=cut,
                init_method=init_method,
                reduce_dtype=reduce_dtype,
                group=comm,
            )
            projection.input_is_copied = True
            self.add_module(name, projection)

    @classmethod
    def from_plain(
        cls: type[QKV],
        plain: nn.Module | Sequence[nn.Module],
        num_heads: int,
        num_kv_heads: int | None = None,
        **options: Any,
    ) -> QKV:
        """This rank's part of one ``nn.Linear`` that computes q|k|v, or of three that compute q, k and v.

        Works like ``ColumnParallelLinear.from_plain``. ``options``: constructor arguments except sizes, bias,
        dtype, device, fused and init_method.
        """
        linears = [plain] if isinstance(plain, nn.Module) else list(plain)
        if len(linears) not in (1, 3):
            raise ValueError(f"{cls.__name__}.from_plain takes one module, q|k|v, or three, not {len(linears)}")
        checked = [checked_plain(linear, nn.Linear, cls) for linear in linears]
        first = checked[0]
        heads = num_heads if len(checked) == 3 else num_heads + 2 * (num_kv_heads or num_heads)
        layer = cls(
            first.in_features,
            num_heads,
            num_kv_heads,
            _head_dim(first.out_features, heads),
            first.bias is not None,
            first.weight.dtype,
            "meta",
            fused=len(checked) == 1,
            init_method=None,
            **options,
        )
        for (name, projection), linear in zip(list(layer.named_children()), checked, strict=True):
            setattr(layer, name, filled(projection, linear))  # type: ignore[type-var]
        return layer.train(first.training)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.copy(x)
        outputs = [projection(x) for projection in self.children()]
        if len(outputs) == 1:
            kv = self.local_kv_heads * self.head_dim
            outputs = list(outputs[0].split([self.local_heads * self.head_dim, kv, kv], -1))
        q, k, v = outputs
        return q, k, v

    def extra_repr(self) -> str:
        return f"local_heads={self.local_heads}, local_kv_heads={self.local_kv_heads}, head_dim={self.head_dim}"


def _head_dim(size: int, heads: int) -> int:
    if heads < 1 or size % heads:
        raise ValueError(f"ParallelQKV: {size} features are not {heads} heads: pass head_dim")
    return size // heads


def _fits(heads: int, kv_heads: int, tp: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _check_heads(heads: int, kv_heads: int, tp: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"ParallelQKV: {heads} heads cannot share {kv_heads} key and value heads evenly")
    if not _fits(heads, kv_heads, tp):
        fit = [n for n in range(1, heads + 1) if _fits(heads, kv_heads, n)]
        raise ValueError(
            f"ParallelQKV: tp={tp} cuts heads apart: {heads} heads and {kv_heads} key and value heads fit "
            f"tp={', '.join(map(str, fit))}"
        )
