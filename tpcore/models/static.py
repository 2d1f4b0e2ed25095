"""Experts as one program, whichever are chosen: for devices that compile what a step does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .dispatch import put, seated, taken

_FORM = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


def has_known_form(experts: Any) -> bool:
    """Whether transformers says of these experts how they compute, by the attributes of its experts' decorator."""
    return all(hasattr(experts, name) for name in _FORM)


def one_program(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What ``experts`` computes, by shapes alone: ``[T, H]``, ``[T, K]``, ``[T, K]`` -> ``[T, H]``. No value is read.

    Of few choices, as while decoding, each gets a copy of its expert's weights; of many, all experts see all tokens.
    """
    if top_k_index.numel() > len(experts.down_proj):
        return every_expert(experts, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import batched_mm_experts_forward

    made: Tensor = batched_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return made


def every_expert(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What ``experts`` computes, each of them on all tokens.

    An expert that a token has not chosen has weight 0 for it. No choice is dropped. It costs ``E / K`` times the
    products of the chosen alone, divided by the ranks that share the experts.
    """
    total = hidden_states.new_zeros(hidden_states.shape)
    for number in range(len(experts.down_proj)):
        share = (top_k_weights * (top_k_index == number)).sum(-1, keepdim=True)
        total = total + (_made(experts, hidden_states, partial(_product, experts, number)) * share).to(total.dtype)
    return total


def with_capacity(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, seats: int
) -> tuple[Tensor, Tensor]:
    """What ``experts`` computes, each of the first ``seats`` tokens that choose it; and the number ``[1]`` of choices
    that are dropped. No value is read, and it costs the products of ``E seats`` tokens."""
    count = len(experts.down_proj)
    source, dropped = seated(top_k_index, count, seats)
    mine = torch.arange(count, device=source.device).repeat_interleave(seats).unsqueeze(1)
    share = (taken(top_k_weights, source) * (taken(top_k_index, source, -1) == mine)).sum(-1, keepdim=True)
    tokens = taken(hidden_states, source).chunk(count)
    out = torch.cat([_made(experts, x, partial(_product, experts, i)) for i, x in enumerate(tokens)])
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
    of, rows = numbers[order], order // top_k_index.shape[-1]
    ends = (numbers <= torch.arange(count, device=numbers.device).unsqueeze(1)).sum(-1, dtype=torch.int32)
    here = (of < count).unsqueeze(1)
    try:
        out = _made(experts, hidden_states[rows], partial(_by_kernel, experts, kernel, of, ends, here))
    except _NotTaken:
        return None
    share = top_k_weights.flatten()[order].unsqueeze(1)
    return put((out * share).to(hidden_states.dtype), rows, len(hidden_states))


def one_by_one(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """A ``grouped_matmul`` of one product for each expert. Reads ``ends``."""
    *rows, rest = x.tensor_split(ends.long().cpu())
    return torch.cat(
        [*(part @ w for part, w in zip(rows, weights, strict=True)), rest.new_zeros(len(rest), weights.shape[-1])]
    )


class _NotTaken(Exception):
    """A backend's kernel does not take tensors of this kind."""


def _by_kernel(
    experts: Any, kernel: Callable[..., Tensor | None], of: Tensor, ends: Tensor, here: Tensor, name: str, x: Tensor
) -> Tensor:
    weight = getattr(experts, name)
    # where, not a product: a kernel may leave NaN in rows of no expert, in outputs and in gradients
    y = kernel(torch.where(here, x, 0), weight if experts.is_transposed else weight.transpose(1, 2), ends)
    if y is None:
        raise _NotTaken
    y = torch.where(here, y, 0)
    return y + getattr(experts, f"{name}_bias")[of.clamp(max=len(weight) - 1)] if experts.has_bias else y


def _made(experts: Any, x: Tensor, product: Callable[[str, Tensor], Tensor]) -> Tensor:
    """What experts make of the tokens ``x``, with ``product`` by a matrix of theirs."""
    inner = product("gate_up_proj" if experts.has_gate else "up_proj", x)
    out = product("down_proj", experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner))
    made: Tensor = experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out
    return made


def _product(experts: Any, number: int, name: str, x: Tensor) -> Tensor:
    weight = getattr(experts, name)[number]
    y: Tensor = x @ (weight if experts.is_transposed else weight.t())
    return y + getattr(experts, f"{name}_bias")[number] if experts.has_bias else y
