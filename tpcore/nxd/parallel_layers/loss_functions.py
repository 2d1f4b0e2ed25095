"""Log-probabilities of the next tokens, over logits whose vocabulary is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.loss import parallel_cross_entropy

__all__ = ["from_parallel_logits_to_logprobs", "parallel_cross_entropy"]


def from_parallel_logits_to_logprobs(vocab_parallel_logits: Tensor, target: Tensor, inference: bool = True) -> Tensor:
    """The log-probability of each next token: ``[batch, sequence - 1]``, the same on every rank.

    ``vocab_parallel_logits``: ``[batch, sequence, vocab / tp]``. ``target``: ``[batch, sequence]``, the tokens
    themselves, which are shifted here: position i is scored against token i + 1. ``inference``: without gradient.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference):
        # the last position has no next token; any id is in range there, and its score is dropped
        return -parallel_cross_entropy(vocab_parallel_logits, target.roll(-1, -1))[:, :-1]
