"""Layers that pass a state from token to token, of whose tokens each rank of cp has some.

A causal convolution sees a few tokens before a rank's own, which come from the ranks that have them. The scan over a
state takes all tokens of some heads in place of all heads of some tokens, by an all-to-all, and back: it is computed as
it is by itself, and what a rank holds of it shrinks as what it holds of the tokens does. Projections and norms stay
with a rank's own tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import lcm
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm
from tpcore.layers.tokens import TokenOrder

from ..plan.inputs import is_own
from ..shard.forwards import with_forward


def _functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """By the names under which the forward of a layer of transformers calls them: what takes its place."""
    # scans are functions, of which no module and no configuration tells: their names in a forward are all there is
    called = inspect.unwrap(type(module).forward).__code__.co_names if is_own(module) else ()
    return {name: _PASSING[name] for name in called if name in _PASSING}


def passes_state(module: nn.Module) -> bool:
    """Whether all that a layer passes from token to token is passed by functions that are known."""
    return bool(_functions(module))


def convolutions(model: nn.Module) -> set[nn.Module]:
    """Those of which layers read the weight alone."""
    layers = [m for m in model.modules() if DealtStates.convolved in _functions(m).values()]
    return {child for layer in layers for child in layer.children() if type(child) is nn.Conv1d}


def check_states(layers: Iterable[nn.Module], comm: Comm) -> None:
    """ValueError if a layer says that it has heads which ``comm`` does not divide; others are counted in a call."""
    for layer in layers:
        heads: Any = getattr(layer, "num_v_heads", getattr(layer, "num_heads", comm.size))
        _check_heads(type(layer).__name__, heads, comm)


def _check_heads(layer: str, heads: int, comm: Comm) -> None:
    if heads % comm.size:
        fit = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"context parallelism over {comm.size} ranks deals the heads of {layer} that passes a state from token to "
            f"token to them, and its {heads} heads fit cp={', '.join(map(str, fit))} only"
        )


def pass_states(model: nn.Module, comm: Comm, order: Callable[[int], TokenOrder]) -> None:
    """Let the layers of ``model`` pass their states over the tokens of all ranks."""
    ranks, made = DealtStates(comm, order), dict[type[nn.Module], type[nn.Module]]()
    for module in model.modules():
        kind = type(module)
        if kind not in made and (known := _functions(module)):
            own: Any = inspect.unwrap(kind.forward)
            ours = {name: partial(way, ranks, own.__globals__[name]) for name, way in known.items()}
            forward = FunctionType(
                own.__code__, own.__globals__ | ours, own.__name__, own.__defaults__, own.__closure__
            )
            forward.__kwdefaults__ = own.__kwdefaults__
            made[kind] = with_forward(kind, forward)
        module.__class__ = made.get(kind, kind)


def states_masks(mask: Tensor | None, order: TokenOrder, *, attends: bool) -> Any:
    """Of the mask that ``DealtTokens`` deals: those of each kind of layer, by the names that transformers knows. States
    pass from document to document, as in one process; of padding a rank sees its own tokens'."""
    mine = None if mask is None or mask.dtype != torch.bool else order.cut(mask[:, 0, 0])
    if not attends:
        return mine
    return {"full_attention": mask, "sliding_attention": mask, "linear_attention": mine, "conv": mine}


@dataclass(frozen=True, eq=False)
class DealtStates:
    comm: Comm
    order: Callable[[int], TokenOrder]
    """Of a number of tokens."""

    def convolved(self, convolution: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
        """A causal convolution of ``[batch, channels, tokens]``: each chunk of a rank's tokens after the ends of those
        before it, which are gathered from all ranks: few tokens, however long the sequence is."""
        order = self.order(x.shape[2] * self.comm.size)
        places = order.places(self.comm.size * order.chunks)
        weight: Tensor = options["weight"] if "weight" in options else args[0]
        before = weight.shape[-1] - 1
        chunks = x.unflatten(2, (len(places), -1))
        end = min(before, chunks.shape[3])  # of shorter chunks all, of several of them
        ends = order.whole(chunks[..., chunks.shape[3] - end :].flatten(2), 2)
        at = places[:, None] * end + torch.arange(before, device=places.device)
        seen = F.pad(ends, (before, 0)).index_select(2, at.flatten()).unflatten(2, (len(places), before))
        rows = torch.cat([seen, chunks], 3).transpose(1, 2).flatten(0, 1)
        out = convolution(rows, *args, **options)[..., before:].unflatten(0, (len(x), -1))
        mine: Tensor = out.transpose(1, 2).flatten(2)
        return mine

    def scanned(self, scan: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A scan of ``[batch, tokens, heads, ...]``, beside parameters of each head. Fewer heads of some arguments are
        shared by heads that follow each other."""
        rows, tokens = args[0].shape[:2]
        given = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
        heads = max(t.shape[2] for t in given if t.ndim > 2)
        _check_heads("a layer", heads, self.comm)
        order = self.order(tokens * self.comm.size)

        def mine(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.shape[:2] != (rows, tokens) or value.ndim < 3:
                return self._own(value)
            copies = lcm(value.shape[2], self.comm.size) // value.shape[2]
            by_heads = value if copies == 1 else value.repeat_interleave(copies, 2)
            return order.sorted(ops.all_to_all(by_heads, self.comm, 2, 1))

        out = scan(*map(mine, args), **{name: mine(value) for name, value in options.items()})
        return self._back(out, lambda whole: ops.all_to_all(order.dealt(whole), self.comm, 1, 2))

    def scanned_by_channels(
        self, scan: Callable[..., Any], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
    ) -> Any:
        """A scan of ``[batch, channels, tokens]``; all channels see the same ``B`` and ``C``."""
        _check_heads("a layer", x.shape[1], self.comm)
        order = self.order(x.shape[2] * self.comm.size)

        def mine(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.shape != x.shape:
                return self._own(value)
            return order.sorted(ops.all_to_all(value, self.comm, 1, 2), 2)

        shared = order.whole(B, 2), order.whole(C, 2)
        out = scan(mine(x), mine(dt), mine(A), *shared, **{name: mine(value) for name, value in options.items()})
        return self._back(out, lambda whole: ops.all_to_all(order.dealt(whole, 2), self.comm, 2, 1))

    def _own(self, parameter: Tensor) -> Tensor:
        """This rank's heads of a parameter of all, by a place that is no constant of a program."""
        parts: Tensor = parameter.unflatten(0, (self.comm.size, -1))
        return parts.index_select(0, self.comm.position).squeeze(0)

    def _back(self, out: Any, exchange: Callable[[Tensor], Tensor]) -> Any:
        return (exchange(out[0]), *out[1:]) if isinstance(out, tuple) else exchange(out)

    def fused(self, kernel: Callable[..., Any], *_: Any, **__: Any) -> None:
        """A kernel of a layer's convolution, scan and projection in one, which sees no other rank's tokens: without its
        result a layer calls those."""


_PASSING: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": DealtStates.convolved,
    "torch_chunk_gated_delta_rule": DealtStates.scanned,
    "chunk_kimi_delta_attention": DealtStates.scanned,
    "mamba2_chunk_scan": DealtStates.scanned,
    "mamba_selective_scan": DealtStates.scanned_by_channels,
    "mamba_inner_fn": DealtStates.fused,
    "mamba2_split_conv1d_scan_combined": DealtStates.fused,
}
"""Of transformers: the functions by which layers pass states, of sequences without a cache."""
