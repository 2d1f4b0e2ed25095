"""How the next token of each request is drawn, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList

from .logprobs import Logprobs


class Sampling(ContinuousBatchingLogitsProcessor):
    """Leaves each row one token, which the engine's argmax takes.

    A request has ``temperature`` (0: the most likely token), ``top_k`` (0: all), ``top_p`` (1: all) and ``seed``. Its
    numbers are drawn from the seed and the place of its token, not from a stream that other requests use too.
    """

    supported_kwargs = {"temperature": float, "top_k": int, "top_p": float, "seed": int}
    ignored_kwargs = ()

    def __init__(self) -> None:
        self._rows: list[tuple[dict[str, Any], int]] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        states = [request.state for request in requests_with_new_token]
        # the place: a request that made room in a full cache begins again with its tokens as a part of the prompt
        places = [len(state.initial_tokens) + state.generated_len() for state in states]
        self._rows = [(state.logit_processor_kwargs, place) for state, place in zip(states, places, strict=True)]
        return torch.zeros(len(states), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        rows = zip(scores, self._rows, strict=False)
        own = self.supported_kwargs
        tokens = [int(choose(row, number, **{k: how[k] for k in own if k in how})) for row, (how, number) in rows]
        chosen = torch.zeros_like(scores)
        chosen[torch.arange(len(tokens)), tokens] = 1
        return chosen


def choose(
    scores: Tensor, number: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0
) -> Tensor:
    """The token after ``scores`` [vocabulary]: softmax with temperature, of the ``top_k`` best, of the fewest whose
    probabilities sum to ``top_p`` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751)."""
    if temperature == 0:
        return scores.argmax()
    k = min(top_k, len(scores)) if top_k > 0 else len(scores)
    wide = scores.float()
    # below the largest: at the smallest temperature the others become minus infinity, and nothing becomes no number
    best, tokens = ((wide - wide.max()) / max(temperature, 1e-6)).topk(k)
    chances = best.softmax(0)
    nucleus = chances.cumsum(0) - chances < top_p
    nucleus[0] = True  # a top_p that is 0 in float32 leaves the most likely one too
    chances = torch.where(nucleus, chances, 0.0)
    generator = torch.Generator(scores.device).manual_seed((seed * 1_000_003 + number) % 2**63)
    return tokens[torch.multinomial(chances, 1, generator=generator)]


def sample_by_request(manager: Any) -> None:
    """Let the requests of ``manager``, which has not started, have their own ``Sampling``."""
    manager.logit_processor = Logprobs(LogitsProcessorList([Sampling()]), manager)
