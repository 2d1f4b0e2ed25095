"""Which tokens the experts of a rank see, and what the experts make of them: one program, whichever are chosen.

An all-to-all with a capacity is that of GShard (Lepikhin et al. 2020, arXiv:2006.16668) with a seat for a token and a
rank instead of an expert: a token goes once to a rank, however many experts it has chosen there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm

from ..plan import rules as plan

GATHERED, ALL_TO_ALL, AUTO = "gathered", "all_to_all", "auto"


@dataclass(frozen=True)
class Dispatch:
    """``way``: to the experts of other ep ranks. ``capacity_factor``: how many times its even share of the choices an
    expert, and a rank of an all-to-all, has seats for; None: for all."""

    way: str = GATHERED
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if self.way not in (GATHERED, ALL_TO_ALL, AUTO):
            raise ValueError(f"dispatch={self.way!r} is none of {GATHERED!r}, {ALL_TO_ALL!r} and {AUTO!r}")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor={self.capacity_factor} is not above 0; None has seats for all choices")

    def seats(self, tokens: int, choices: int, parts: int) -> int:
        """In one of ``parts`` ranks or experts, for ``tokens`` with ``choices`` each."""
        share = math.inf if self.capacity_factor is None else self.capacity_factor * tokens * choices / parts
        return tokens if share >= tokens else math.ceil(share)

    def by_bytes(self, x: Tensor, numbers: Tensor, weights: Tensor, parts: int, ranks: int) -> Route:
        """What each of ``ranks`` sends in the forward of one layer, as in its backward: of a token its ``[H]`` there
        and back, and its ``[K]`` numbers and weights there. Sums over ranks are in float32 at least."""
        (tokens, choices), width = numbers.shape, x.shape[-1]
        routing = choices * (numbers.element_size() + weights.element_size())
        seats = self.seats(tokens, choices, parts)
        sent = (ranks - 1) * seats * (2 * width * x.element_size() + routing)
        both_ways = (x.element_size() + ops.sum_dtype(x, torch.float32).itemsize) * width
        gathered = (ranks - 1) * tokens * (both_ways + routing)
        way = self.way if self.way != AUTO else ALL_TO_ALL if sent < gathered else GATHERED
        return Route(way, seats, sent, gathered, asked=self.way != AUTO)


class Route(NamedTuple):
    """How the tokens of a rank come to others: ``way``, with the bytes of either and the rows of an all-to-all."""

    way: str
    seats: int
    sent: int
    gathered: int
    asked: bool

    def __str__(self) -> str:
        why = f"all-to-all sends {self.sent:,} bytes forward, {self.seats} rows to each rank, and gathering "
        return f"{self.way}: {why}{self.gathered:,}" + (f"; dispatch={self.way!r} was asked for" if self.asked else "")


@dataclass(frozen=True)
class GatherTokens:
    """The tokens of all ranks of ``comm``: no choice is dropped."""

    comm: Comm

    def enter(self, x: Tensor) -> Tensor:
        """``[T, ...]`` of each rank -> ``[n T, ...]``."""
        if not x.is_floating_point():
            return self.comm.all_gather(x, 0)
        return ops.all_gather(x, self.comm, 0, dtype=torch.float32)

    def leave(self, out: Tensor) -> Tensor:
        """What each rank adds to ``[n T, H]`` -> the sums ``[T, H]`` of this rank's tokens."""
        return ops.reduce_scatter(out, self.comm, 0, dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class SendTokens:
    """The tokens for which the seats of :func:`seated` have room, ``source`` says which."""

    source: Tensor
    tokens: int
    comm: Comm

    def enter(self, x: Tensor) -> Tensor:
        """``[T, ...]`` of each rank -> ``[n seats, ...]``; where nobody sits, a number is -1, a float 0."""
        if not x.is_floating_point():
            return self.comm.all_to_all(taken(x, self.source, -1), 0, 0)
        return ops.all_to_all(taken(x, self.source), self.comm, 0, 0)

    def leave(self, out: Tensor) -> Tensor:
        """What the experts of this rank make of ``[n seats, H]`` -> the sums ``[T, H]`` of this rank's tokens."""
        return put(ops.all_to_all(out, self.comm, 0, 0), self.source, self.tokens)


def seated(chosen: Tensor, parts: int, seats: int) -> tuple[Tensor, Tensor]:
    """Give the first ``seats`` rows that choose a part a seat in it. ``chosen``: ``[rows, K]``, each in
    ``range(parts)``, or ``parts`` for none. Returns ``[parts * seats]``, the row of each seat or ``rows`` for nobody,
    and ``[1]``, the number of choices without a seat. Of shapes alone: no value is read."""
    rows, device = len(chosen), chosen.device
    counts, place = _places(chosen, parts)
    sits = (counts > 0) & (place < seats)
    seat = torch.where(sits, torch.arange(parts, device=device) * seats + place, parts * seats)
    row = torch.arange(rows, device=device).unsqueeze(1).expand_as(seat)
    source = torch.full((parts * seats + 1,), rows, dtype=torch.int64, device=device)
    source = source.scatter(0, seat.flatten(), row.flatten())[:-1]  # the last is for all that have no seat
    return source, (counts * ~sits).sum().reshape(1)


def has_seat(chosen: Tensor, parts: int, seats: int) -> Tensor:
    """For each entry of ``chosen`` whether :func:`seated` gives its row a seat in that part."""
    return _places(chosen, parts)[1].gather(1, chosen.long()) < seats


def _places(chosen: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """``[rows, parts]``: how often a row chooses a part, and how many rows before it do."""
    # in float32: compilers may have no sums of whole numbers by index
    counts = torch.zeros(len(chosen), parts + 1, dtype=torch.float32, device=chosen.device)
    counts = counts.scatter_add(1, chosen.long(), torch.ones_like(chosen, dtype=torch.float32))[:, :parts].long()
    return counts, (counts > 0).to(torch.int64).cumsum(0) - 1  # torch_xla sums bools as bools


def taken(x: Tensor, source: Tensor, empty: float = 0) -> Tensor:
    """The rows ``source`` of ``x``, ``empty`` for the row after the last. Their gradients are summed in float32."""
    wide = x.to(ops.sum_dtype(x, torch.float32)) if x.is_floating_point() else x
    return torch.cat([wide, wide.new_full((1, *x.shape[1:]), empty)]).index_select(0, source).to(x.dtype)


def put(out: Tensor, source: Tensor, rows: int) -> Tensor:
    """The sums of ``out`` at its rows ``source``: what :func:`taken` is the transpose of."""
    wide = out.to(ops.sum_dtype(out, torch.float32))
    return wide.new_zeros(rows + 1, *out.shape[1:]).index_add(0, source, wide)[:rows].to(out.dtype)


def has_known_form(experts: Any) -> bool:
    """Whether transformers says of these experts how they compute, by the attributes of its experts' decorator."""
    return all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def one_program(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What ``experts`` computes, by shapes alone: ``[T, H]``, ``[T, K]``, ``[T, K]`` -> ``[T, H]``. No value is read.
    Of few choices, as while decoding, each gets a copy of its expert's weights; of many, all experts see all tokens."""
    if top_k_index.numel() > len(experts.down_proj):
        return every_expert(experts, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import batched_mm_experts_forward

    output: Tensor = batched_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return output


def every_expert(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What ``experts`` computes, each of them on all tokens, with weight 0 where it was not chosen: ``E / K`` times the
    products of the chosen alone, divided by the ranks that share the experts."""
    total = hidden_states.new_zeros(hidden_states.shape)
    for number in range(len(experts.down_proj)):
        share = (top_k_weights * (top_k_index == number)).sum(-1, keepdim=True)
        total = total + (_mlp(experts, hidden_states, partial(_product, experts, number)) * share).to(total.dtype)
    return total


def with_capacity(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, seats: int
) -> tuple[Tensor, Tensor]:
    """What ``experts`` computes, each of the first ``seats`` tokens that choose it; and the number ``[1]`` of choices
    that are dropped. No value is read, and it costs the products of ``E seats`` tokens."""
    count = len(experts.down_proj)
    source, dropped = seated(top_k_index, count, seats)
    expert = torch.arange(count, device=source.device).repeat_interleave(seats).unsqueeze(1)
    share = (taken(top_k_weights, source) * (taken(top_k_index, source, -1) == expert)).sum(-1, keepdim=True)
    tokens = taken(hidden_states, source).chunk(count)
    out = torch.cat([_mlp(experts, x, partial(_product, experts, i)) for i, x in enumerate(tokens)])
    return put((out * share).to(hidden_states.dtype), source, len(hidden_states)), dropped


def grouped(
    experts: Any,
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor | None],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor | None:
    """What ``experts`` computes, each of the chosen only, by a backend's ``grouped_matmul``; None if that takes them
    not. No value is read. Choices without an expert here, whose number is that of all, come last and count 0."""
    count, numbers = len(experts.down_proj), top_k_index.flatten()
    order = numbers.argsort(stable=True)
    expert, rows = numbers[order], order // top_k_index.shape[-1]
    ends = (numbers <= torch.arange(count, device=numbers.device).unsqueeze(1)).sum(-1, dtype=torch.int32)
    here = (expert < count).unsqueeze(1)

    def product(name: str, x: Tensor) -> Tensor:
        weight = getattr(experts, name)
        # where, not a product: a kernel may leave NaN in rows of no expert, in outputs and in gradients
        y = kernel(torch.where(here, x, 0), weight if experts.is_transposed else weight.transpose(1, 2), ends)
        if y is None:
            raise _Unsupported
        y = torch.where(here, y, 0)
        return y + getattr(experts, f"{name}_bias")[expert.clamp(max=count - 1)] if experts.has_bias else y

    try:
        out = _mlp(experts, hidden_states[rows], product)
    except _Unsupported:
        return None
    share = top_k_weights.flatten()[order].unsqueeze(1)
    return put((out * share).to(hidden_states.dtype), rows, hidden_states.shape[0])


class _Unsupported(Exception):
    """A backend's kernel does not take tensors of this kind."""


def _mlp(experts: Any, x: Tensor, product: Callable[[str, Tensor], Tensor]) -> Tensor:
    """What experts make of the tokens ``x``, with ``product`` by a matrix of theirs."""
    inner = product("gate_up_proj" if experts.has_gate else "up_proj", x)
    out = product("down_proj", experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner))
    normed: Tensor = experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out
    return normed


def _product(experts: Any, number: int, name: str, x: Tensor) -> Tensor:
    weight = getattr(experts, name)[number]
    y: Tensor = x @ (weight if experts.is_transposed else weight.t())
    return y + getattr(experts, f"{name}_bias")[number] if experts.has_bias else y


def check_dispatch(model: str, experts: Mapping[str, nn.Module], dispatch: Dispatch) -> None:
    """ValueError for a way or a capacity that no layer of ``model`` can have. ``experts``: its layers, by name."""
    if dispatch != Dispatch() and not experts:
        raise ValueError(
            f"dispatch={dispatch.way!r}, capacity_factor={dispatch.capacity_factor}: {model} has no layers of experts "
            "that its plan shards"
        )
    for name, layer in experts.items() if dispatch.capacity_factor is not None else ():
        if not has_known_form(layer) or "top_k_index" not in inspect.signature(layer.forward).parameters:
            raise ValueError(
                f"capacity_factor: {plan.wildcard(name)} ({type(layer).__name__}) computes in a form of its own, "
                "which cannot be given some tokens for each expert: leave it out"
            )
