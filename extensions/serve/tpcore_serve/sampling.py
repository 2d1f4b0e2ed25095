"""How the next token of each request is drawn, whatever else is in the batch, and the log-probabilities told of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

_ELEMENTS = 2**23  # of logits that are float64 at a time
_LEAST = -9999.0  # in JSON there is no minus infinity
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTES = re.compile(r"bytes:((\\x[0-9a-f]{2})+)")
_NO_CHARACTER = "\ufffd"

Taken = tuple[int, float, list[tuple[int, float]]]
"""A token, its log-probability, and the most likely tokens with theirs."""


def taken(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Taken]:
    """Of each row of ``logits``, for its token and for so many of the most likely ones."""
    rows: list[Taken] = []
    step = max(1, _ELEMENTS // logits.shape[-1])
    for at in range(0, len(tokens), step):
        some = tokens[at : at + step]
        scores = logits[at : at + step].double().log_softmax(-1)
        values = scores[torch.arange(len(some)), torch.tensor(some)].tolist()
        best, ids = (part.tolist() for part in scores.topk(min(max(counts), scores.shape[-1])))
        those = zip(some, values, ids, best, counts[at : at + step], strict=True)
        rows += [(token, value, [*zip(i[:n], b[:n], strict=True)]) for token, value, i, b, n in those]
    return rows


class Logprobs(ContinuousBatchingLogitsProcessorList):
    """The engine's list of processors, which also notes log-probabilities in the states of their requests.

    A request that asks says ``logprobs`` (of how many of the most likely tokens) and ``echo`` (whether of its prompt
    too, from the second token). They are those of the model, before temperature, ``top_k`` and ``top_p``.
    """

    def __init__(self, processors: Any, manager: Any) -> None:
        super().__init__(processors)
        self.tensors_required = len(processors)
        self.supported_keys |= {"logprobs": int, "echo": bool}
        self._prompt: list[tuple[int, Any, int]] = []  # (row of the batch, state of the request, next token)
        self._states: list[Any] = []
        self._new: Any = None
        manager.model.register_forward_pre_hook(self._widen, with_kwargs=True)
        manager.model.register_forward_hook(self._take, with_kwargs=True)
        self._manager = manager

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Of a request that comes. Before the first, let those with ``echo`` run their whole prompts: blocks of another
        request's prompt have no logits."""
        super().check_kwargs(kwargs)
        cache, waiting = self._manager.batch_processor.cache, self._manager.batch_processor.scheduler.waiting_requests
        if "search_prefix_match" in vars(cache):
            return
        search = cache.search_prefix_match

        def matched(request_id: str, ids: list[int]) -> int:
            return 0 if waiting[request_id].logit_processor_kwargs.get("echo") else search(request_id, ids)

        cache.search_prefix_match = matched

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        self._prompt, self._states, row = [], [], 0
        for request in requests_in_batch:
            state, length = request.state, request.query_length
            first = state.position_offset - length
            if state.logit_processor_kwargs.get("echo"):
                # a request that made room in a full cache comes again, with what was noted of it
                end = min(state.position_offset + 1, len(state.initial_tokens))
                ahead = range(max(first, len(state.logprobs)) + 1, end)
                self._prompt += [(row + i - 1 - first, state, state.initial_tokens[i]) for i in ahead]
            if request.has_new_token:
                self._states.append(state)
            row += length
        return super().prepare_tensor_args(requests_in_batch, arg_storage)

    def _widen(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        keep = kwargs.get("logits_to_keep")
        if keep is None or not self._prompt:
            return None
        rows = torch.tensor([row for row, _, _ in self._prompt], dtype=keep.dtype, device=keep.device)
        return args, kwargs | {"logits_to_keep": torch.cat([keep, rows])}

    def _take(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Of the prompts now, and what the engine rounds of the new tokens for when they are chosen."""
        new = kwargs.get("logits_indices")
        if new is None:  # a forward that is not the engine's
            return
        keep, logits, prompt = kwargs.get("logits_to_keep"), output.logits[0], self._prompt
        if keep is None:
            self._new = logits[new]
            rows = logits[[row for row, _, _ in prompt]]
        else:
            self._new, rows = logits[: len(new)], logits[len(new) :]
            output.logits = output.logits[:, : len(new)]
        if prompt:
            counts = [state.logit_processor_kwargs["logprobs"] for _, state, _ in prompt]
            those = taken(rows, [token for _, _, token in prompt], counts)
            for (_, state, _), each in zip(prompt, those, strict=True):
                state.logprobs.append(each)

    def __call__(self, input_ids: Any, scores: Any, logits_processor_args: Tensor) -> Tensor:
        chosen = super().__call__(input_ids, scores, logits_processor_args)
        asked = [i for i, state in enumerate(self._states) if "logprobs" in state.logit_processor_kwargs]
        if asked:
            counts = [self._states[i].logit_processor_kwargs["logprobs"] for i in asked]
            for i, each in zip(asked, taken(self._new[asked], chosen[asked].argmax(-1).tolist(), counts), strict=True):
                self._states[i].logprobs.append(each)
        self._new = None
        return chosen


class Likelihood(NamedTuple):
    """One token of a choice: its text, where this begins, its log-probability, and the most likely tokens there."""

    text: str
    offset: int
    logprob: float | None
    best: list[tuple[str, float]]


class Passage(str):
    """A part of an answer, with the entries of the tokens that came with it."""

    entries: Sequence[Likelihood] = ()


class Names:
    """What tokens are called: their text in the midst of others, and of one that has none or another's, its number."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte = {character: byte for byte, character in bytes_to_unicode().items()}
        self.of = functools.cache(self._of)

    def entry(self, offset: int, taken: Taken) -> Likelihood:
        token, value, best = taken
        names = {self.of(token): token}
        for other, _ in best:
            names.setdefault(self.of(other), other)
        called = {number: name for name, number in names.items()}
        tops = [(called.get(other, f"token_id:{other}"), max(value, _LEAST)) for other, value in best]
        return Likelihood(called[token], offset, max(value, _LEAST), tops)

    def _of(self, token: int) -> str:
        one, two = (str(self._tokenizer.decode([token] * n, skip_special_tokens=False)) for n in (1, 2))
        text = two[len(one) :] if two.startswith(one) else one
        if _NO_CHARACTER not in text:
            return text or f"token_id:{token}"
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if found := _BYTE.fullmatch(piece):
            return _escaped([int(found[1], 16)])
        return _escaped(self._byte[c] for c in piece) if all(c in self._byte for c in piece) else text


def _escaped(values: Iterable[int]) -> str:
    """OpenAI's name of bytes that are no text."""
    return "bytes:" + "".join(f"\\x{value:02x}" for value in values)


def of_completion(entries: Sequence[Likelihood]) -> dict[str, Any]:
    """As /v1/completions tells them: four lists. The first token of all has no log-probability."""
    tops = [
        None if e.logprob is None else dict([*e.best, (e.text, e.logprob)] if e.text not in dict(e.best) else e.best)
        for e in entries
    ]
    return {
        "tokens": [e.text for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": tops,
        "text_offset": [e.offset for e in entries],
    }


def of_chat(entries: Sequence[Likelihood]) -> dict[str, Any]:
    """As /v1/chat/completions tells them: a list of objects."""

    def told(text: str, value: float | None) -> dict[str, Any]:
        found = _BYTES.fullmatch(text)
        raw = bytes.fromhex(found[1].replace("\\x", "")) if found else text.encode()
        return {"token": text, "logprob": value, "bytes": [*raw]}

    content = [told(e.text, e.logprob) | {"top_logprobs": [told(*each) for each in e.best]} for e in entries]
    return {"content": content, "refusal": None}


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
