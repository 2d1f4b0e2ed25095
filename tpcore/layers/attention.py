"""Column layers that share one input, whose gradient is summed once: query, key and value projections for instance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..layout.shard import Block
from ..runtime.context import current
from .adopt import checked_plain, filled
from .fused import enter
from .initial import Init
from .linear import ColumnParallelLinear
from .module import Device


def _copied(
    copy: Callable[[Tensor], Tensor],
    name: str,
    at: int,
    owner: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook that replaces one argument of an owner's forward, by name or position ``at``, by its copy."""
    if name in kwargs:
        return args, {**kwargs, name: copy(kwargs[name])}
    return (*args[:at], copy(args[at]), *args[at + 1 :]), kwargs


def share_input(
    owner: nn.Module,
    *columns: ColumnParallelLinear,
    argument: str = "hidden_states",
    copy: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Let ``columns`` share one copy of an input. ``owner.forward`` calls them on its ``argument``.

    The gradient of that argument is then summed over the tp group once instead of once per column: 2 of 5 all-reduces
    remain in the backward of a Llama block. ``owner.forward`` must use the argument for nothing else, because gradients
    from other uses would be summed too. ``copy``: makes the copy; by default with the group, sequence dim and dtype of
    the columns.
    """
    # a hook without state: activation checkpointing, deepcopy, torch.export and a second call before backward work
    kinds = {(c.tp, c.sequence_dim, c.reduce_dtype) for c in columns}
    if len(kinds) != 1 or any(c.input_is_copied for c in columns):
        descriptions = [
            f"{c.tp.group.axes}, sequence_dim={c.sequence_dim}, {c.reduce_dtype}, input_is_copied={c.input_is_copied}"
            for c in columns
        ]
        raise ValueError(
            f"share_input: the columns of a {type(owner).__name__} need one group, sequence dim and "
            f"reduce_dtype, and inputs that are no copies yet: {descriptions}"
        )
    names = list(inspect.signature(owner.forward).parameters)
    if argument not in names:
        raise ValueError(f"{type(owner).__name__}.forward has no argument {argument!r} but {names}")
    spec = kinds.pop()
    hook = partial(_copied, copy or partial(enter, spec=spec), argument, names.index(argument))
    owner.register_forward_pre_hook(hook, with_kwargs=True)
    for column in columns if spec[0].blocks is None else ():
        column.input_is_copied, column.sequence_dim = True, None


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
        self.copy = partial(enter, spec=(comm, sequence_dim, reduce_dtype))
        column = partial(ColumnParallelLinear, init_method=init_method, reduce_dtype=reduce_dtype, group=comm)
        kv = Block(num_kv_heads * self.head_dim, self.head_dim, replicate=True)
        blocks = (Block(num_heads * self.head_dim, self.head_dim), kv, kv)
        parts = {"qkv_proj": blocks} if fused else {f"{n}_proj": (b,) for n, b in zip("qkv", blocks, strict=True)}
        for name, cut in parts.items():
            size = sum(block.size for block in cut)
            projection = column(hidden_size, size, bias, False, dtype, device, blocks=cut)
            projection.input_is_copied = comm.blocks is None
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
        sizes = first.in_features, num_heads, num_kv_heads, _head_dim(first.out_features, heads), first.bias is not None
        layer = cls(*sizes, first.weight.dtype, "meta", fused=len(checked) == 1, init_method=None, **options)
        for (name, projection), linear in zip(list(layer.named_children()), checked, strict=True):
            setattr(layer, name, filled(projection, linear))  # type: ignore[type-var]
        return layer.train(first.training)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.copy(x)
        q, *kv = [projection(x) for projection in self.children()]
        if not kv:
            size = self.local_kv_heads * self.head_dim
            q, *kv = q.split([self.local_heads * self.head_dim, size, size], -1)
        return q, kv[0], kv[1]

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
