"""Tokens one after the other, from a traced causal language model whose ranks keep keys and values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index

import torch
from torch import Tensor

from ...errors import counted
from .model import TensorParallelModel


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, ``[batch]``."""
    return logits.argmax(-1)


def generate(
    model: TensorParallelModel,
    prompts: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    choose: Callable[[Tensor], Tensor] = greedy,
) -> Iterator[Tensor]:
    """Yield the next token of each prompt, int64 ``[prompts]``, as soon as it is there.

    ``model``: traced with a cache of keys and values. ``prompts``: token ids, a tensor ``[prompts, tokens]`` or
    sequences of several lengths, no more than the rows of the model's cache. ``stop_tokens``: a row that has come to
    one repeats it, and all rows end when each has. ``choose``: the tokens of the next step, ``[rows]``, from logits
    ``[rows, vocabulary]``.

    The cache holds one generation at a time: when another begins, the earlier one raises RuntimeError.
    ValueError for a model without a cache, and for prompts that do not fit, before the first call."""
    rows, _, _ = _sizes(model)
    if len(prompts) > rows:
        raise ValueError(
            f"{len(prompts)} prompts: the cache has {counted(rows, 'row')}; generate_each takes any number"
        )
    stops = set(_numbers(stop_tokens, "stop_tokens"))
    each = generate_each(model, prompts, max_new_tokens=max_new_tokens, stop_tokens=[*stops], choose=choose)
    return _side_by_side(each, len(prompts), stops)


def _numbers(tokens: Sequence[int], what: str) -> list[int]:
    """``tokens`` as numbers: a tensor's elements are equal to no number in a set, and 1.7 is not the token 1."""
    try:
        return list(map(index, tokens))
    except TypeError:
        raise TypeError(f"{what}={tokens!r}: a list of token ids") from None


def _side_by_side(each: Iterator[tuple[int, int]], count: int, stops: set[int]) -> Iterator[Tensor]:
    """The tokens of ``each`` of ``count`` prompts in step; those that have come to an end repeat it."""
    come = [deque[int]() for _ in range(count)]
    token = [0] * count
    begun = False
    for number, new in each:
        come[number].append(new)
        while any(come) and all(new or (begun and token[i] in stops) for i, new in enumerate(come)):
            token = [new.popleft() if new else old for new, old in zip(come, token, strict=True)]
            begun = True
            yield torch.tensor(token)


def generate_each(
    model: TensorParallelModel,
    prompts: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    choose: Callable[[Tensor], Tensor] = greedy,
) -> Iterator[tuple[int, int]]:
    """Yield ``(number of a prompt, its next token)``, as soon as there is one, for any number of prompts.

    A row of the cache that has come to its end takes the next prompt, in the order of ``prompts``, while the other rows
    go on. The arguments and errors are those of ``generate``, which steps rows together."""
    rows, longest, chunk = _sizes(model)
    ids = [_numbers(prompt, "prompt") for prompt in prompts]
    if not ids or not all(ids):
        raise ValueError(f"{len(ids)} prompts: one or more, and a prompt has a token or more")
    most = max(map(len, ids)) + max_new_tokens
    if max_new_tokens < 1 or max_new_tokens % 1 or most > longest:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} after a prompt of {max(map(len, ids))}: at least one, "
            f"and the cache holds {longest} tokens of each row"
        )
    cache, stops = [_CacheRow(longest) for _ in range(rows)], set(_numbers(stop_tokens, "stop_tokens"))
    return _each(model, ids, cache, chunk, max_new_tokens, stops, choose)


@dataclass
class _CacheRow:
    """One row of the cache: ``todo`` are the tokens that it has not seen yet; none if it is idle."""

    end: int
    number: int = -1
    todo: list[int] = field(default_factory=list)
    at: int = 0
    generated: int = 0

    def call(self, width: int) -> tuple[list[int], int, int]:
        """The tokens of the next call of ``width``, their place, and which is the last. What stands behind it is
        overwritten before anybody sees it; an idle row writes behind the end."""
        part = self.todo[:width]
        place = self.at if part else self.end
        self.todo, self.at = self.todo[width:], self.at + len(part)
        return [*part, *[0] * (width - len(part))], place, max(0, len(part) - 1)


def _each(
    model: TensorParallelModel,
    prompts: list[list[int]],
    rows: list[_CacheRow],
    chunk: int,
    steps: int,
    stops: set[int],
    choose: Callable[[Tensor], Tensor],
) -> Iterator[tuple[int, int]]:
    use, waiting = model.begin(), deque(enumerate(prompts))
    while True:
        for row in rows:
            if row.number < 0 and waiting:
                row.number, row.todo = waiting.popleft()
                row.at = row.generated = 0
        width = min(chunk, max(len(row.todo) for row in rows))
        if not width:
            return
        ids, places, last = zip(*(row.call(width) for row in rows), strict=True)
        logits = model.call_with_state(use, torch.tensor(ids), torch.tensor(places), torch.tensor(last))[0]
        tokens = choose(logits).tolist()
        for row, token in zip(rows, tokens, strict=True):
            if row.number < 0 or row.todo:
                continue
            number, row.generated, row.todo = row.number, row.generated + 1, [token]
            if row.generated == steps or token in stops:
                row.number, row.todo = -1, []
            yield number, token


def _sizes(model: TensorParallelModel) -> tuple[int, int, int]:
    """(rows of the cache, tokens of each, tokens that one call takes)."""
    manifest = model.manifest
    state = [manifest.weights[name].spec.shape for name in manifest.outputs.state]
    if manifest.inputs.arguments.names != ["input_ids", "start", "last"] or not state:
        raise ValueError(f"{model} keeps no keys and values: trace it with its cache as state")
    size = manifest.inputs.shapes[0][1]
    chunk = max(bucket[size] for bucket in manifest.inputs.buckets) if isinstance(size, str) else size
    return state[0][0], state[0][2] - 1, chunk
