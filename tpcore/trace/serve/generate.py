"""Tokens one after the other, from a traced causal language model whose ranks keep keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

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

    ``model``: what ``tpcore.models.trace_causal_lm`` made, loaded or not. ``prompts``: token ids, a tensor ``[prompts,
    tokens]`` or sequences of several lengths, no more than the rows of the model's cache. ``stop_tokens``: a row that
    has come to one repeats it, and all rows end when each has come to one. ``choose``: the tokens of the next step,
    ``[rows]``, from logits ``[rows, vocabulary]``; by default the most likely ones.

    The cache holds one generation at a time: when another begins, the earlier one raises RuntimeError. Raises
    ValueError for a model without a cache, and for prompts that do not fit, before the first call.
    """
    rows, longest, chunk = _sizes(model)
    ids = [list(map(int, prompt)) for prompt in prompts]
    if not ids or len(ids) > rows or not all(ids):
        raise ValueError(f"{len(ids)} prompts: the cache has {rows} rows, and a prompt has a token or more")
    most = max(map(len, ids)) + max_new_tokens
    if max_new_tokens < 1 or most > longest:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} after a prompt of {most - max_new_tokens}: at least one, "
            f"and the cache holds {longest} tokens of each row"
        )
    ids += [[0]] * (rows - len(ids))
    stop = torch.tensor(stop_tokens, dtype=torch.int64)
    return _tokens(model, ids, len(prompts), chunk, max_new_tokens, stop, choose)


def _sizes(model: TensorParallelModel) -> tuple[int, int, int]:
    """(rows of the cache, tokens of each, tokens that one call takes)."""
    manifest = model.manifest
    state = [manifest.weights[name].spec.shape for name in manifest.outputs.state]
    if manifest.inputs.arguments.names != ["input_ids", "start", "last"] or not state:
        raise ValueError(f"{model} keeps no keys and values: tpcore.models.trace_causal_lm makes one that does")
    size = manifest.inputs.shapes[0][1]
    chunk = max(bucket[size] for bucket in manifest.inputs.buckets) if isinstance(size, str) else size
    return state[0][0], state[0][2] - 1, chunk


def _tokens(
    model: TensorParallelModel,
    prompts: list[list[int]],
    wanted: int,
    chunk: int,
    steps: int,
    stop: Tensor,
    choose: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    use = model.begin()
    at = torch.tensor([len(prompt) for prompt in prompts])
    token = choose(_prompt(model, use, prompts, at, chunk))
    ended = torch.isin(token, stop)
    none = torch.zeros_like(at)
    for step in range(1, steps + 1):
        yield token[:wanted].clone()
        if step == steps or bool(ended[:wanted].all()):
            return
        logits = model.call_with_state(use, token[:, None], at, none)[0]
        token = torch.where(ended, token, choose(logits))
        ended, at = ended | torch.isin(token, stop), at + 1


def _prompt(model: TensorParallelModel, use: int, prompts: list[list[int]], lengths: Tensor, chunk: int) -> Tensor:
    """The logits after each prompt. What stands behind a shorter one is overwritten by its answer."""
    longest = int(lengths.max())
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    found = torch.tensor(())
    for begin in range(0, longest, chunk):
        part = ids[:, begin : begin + chunk].contiguous()
        last = (lengths - 1 - begin).clamp(0, part.shape[1] - 1)
        logits = model.call_with_state(use, part, torch.full_like(lengths, begin), last)[0]
        here = (lengths > begin)[:, None]  # of rows that end before, the call before it had them
        found = torch.where(here, logits, found) if begin else logits
    return found
