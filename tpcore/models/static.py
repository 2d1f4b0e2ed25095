"""Experts as one program, whichever are chosen: for devices that compile what a step does."""

from __future__ import annotations

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
        total = total + (_made(experts, hidden_states, number) * share).to(total.dtype)
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
    out = torch.cat([_made(experts, x, number) for number, x in enumerate(tokens)])
    return put((out * share).to(hidden_states.dtype), source, len(hidden_states)), dropped


def _made(experts: Any, x: Tensor, number: int) -> Tensor:
    """What one of the experts makes of the tokens ``x``."""
    inner = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", x, number)
    out = _product(
        experts, "down_proj", experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner), number
    )
    made: Tensor = experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out
    return made


def _product(experts: Any, name: str, x: Tensor, number: int) -> Tensor:
    weight = getattr(experts, name)[number]
    y: Tensor = x @ (weight if experts.is_transposed else weight.t())
    return y + getattr(experts, f"{name}_bias")[number] if experts.has_bias else y
