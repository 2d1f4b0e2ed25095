"""A causal language model whose keys and values are buffers: what a traced model keeps from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.errors import BackendError
from tpcore.trace.api import parallel_model_trace
from tpcore.trace.serve.model import TensorParallelModel

from ..experts.layers import dropping_nothing
from ..plan.inputs import cache_argument, cache_of, takes


class _Buffers:
    """The cache that a model of transformers asks for, over buffers ``[batch, heads, tokens, features]``: new keys and
    values are written in place at ``positions``. The model has masks and positions, so that it asks for no lengths."""

    def __init__(self, states: Mapping[int, tuple[Tensor, Tensor]], positions: Tensor) -> None:
        self.states, self._positions = states, positions[:, None, :, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for buffer, new in zip(self.states[layer_idx], (keys, values), strict=True):
            buffer.scatter_(2, self._positions.expand_as(new), new)
        return self.states[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class CachedModel(nn.Module):
    """``model`` over a cache of ``max_length`` tokens for each of ``batch_size`` rows. Each row has its own positions,
    so rows may be of different lengths, and a row begins anew at position 0. What a call writes behind a row's last
    token is padding, which nobody sees: a token sees the positions up to its own, and all of those are written
    before."""

    def __init__(self, model: Any, max_length: int, batch_size: int) -> None:
        super().__init__()
        self._argument = check_takes_cache(model, max_length)
        self.model, self.max_length = model.eval(), max_length
        ids = torch.arange(batch_size * 4, device=model.device).view(batch_size, 4) % 7 + 1
        with dropping_nothing(model):
            with torch.no_grad():
                whole = model(input_ids=ids, use_cache=True)
            self._layers = self._register(cache_of(whole))
            model.get_output_embeddings().register_forward_pre_hook(self._keep_last)
            self._check(ids, whole.logits)

    def _register(self, cache: Any) -> list[int]:
        """A buffer for the keys and one for the values of each layer that has any; the layers' numbers."""
        numbers = []
        for number, layer in enumerate(getattr(cache, "layers", ())):
            states: dict[str, Any] = {kind: getattr(layer, kind, None) for kind in ("keys", "values")}
            if all(isinstance(t, Tensor) and t.ndim == 4 for t in states.values()):
                numbers.append(number)
                for kind, t in states.items():
                    # one place more than there are tokens: padding that has none is written there
                    size = t.shape[0], t.shape[1], self.max_length + 1, t.shape[3]
                    buffer = torch.zeros(size, dtype=t.dtype, device=t.device)  # not of its class: a checked run's part
                    self.register_buffer(f"{kind}_{number}", buffer, persistent=False)
        if not numbers:
            raise ValueError(_NO_CACHE.format(type(self.model).__name__))
        return numbers

    def forward(self, input_ids: Tensor, start: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """Logits ``[batch, vocabulary]`` of one token of each row, and the cache with this call's tokens.
        ``input_ids``: ``[batch, tokens]``. ``start``: ``[batch]``, the position of each row's first token. ``last``:
        ``[batch]``, which token of the call it is whose logits are asked for."""
        positions = start[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
        seen = torch.arange(self.max_length + 1, device=input_ids.device) <= positions[:, None, :, None]
        dtype = self.model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
        buffers = {n: (self.get_buffer(f"keys_{n}"), self.get_buffer(f"values_{n}")) for n in self._layers}
        cache = _Buffers(buffers, positions.clamp(max=self.max_length))
        inputs = {"input_ids": input_ids, "attention_mask": mask, self._argument: cache, "use_cache": True}
        if takes(self.model, "position_ids"):
            inputs["position_ids"] = positions.clamp(max=self.max_length - 1)
        self._last: Tensor | None = last
        try:
            output = self.model(**inputs)
        finally:
            self._last = None
        return output.logits[:, 0], *(t for n in self._layers for t in buffers[n])

    def aliases(self) -> dict[Tensor, int]:
        """The index of the output that replaces each buffer."""
        return {t: 1 + i for i, (_, t) in enumerate(self.named_buffers(recurse=False))}

    def _keep_last(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A hook: the head computes the logits of one token of each row."""
        last = getattr(self, "_last", None)
        if last is None:
            return None
        hidden = args[0]
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])), *args[1:]

    @torch.no_grad()
    def _check(self, ids: Tensor, whole: Tensor) -> None:
        """ValueError where tokens one by one with the cache give other logits than all at once without."""
        kind, start = type(self.model).__name__, torch.zeros_like(ids[:, 0])
        try:
            self(ids[:, :3], start, start + 2)
            logits = self(ids[:, 3:], start + 3, start)[0].float()
        except BackendError:
            raise
        except Exception as e:  # whatever a model does with a cache that is not what it expects
            raise ValueError(f"{kind} takes no cache of keys and values alone: {type(e).__name__}: {e}") from e
        for buffer in self.buffers(recurse=False):
            buffer.zero_()
        limit = 1e-3 if whole.dtype == torch.float32 else 0.1  # of the largest: bfloat16 has 8 bits
        worst = float((logits - whole[:, -1].float()).abs().max() / (whole.abs().max() + 1e-6))
        if not worst <= limit:
            raise ValueError(
                f"{kind} computes something else with its keys and values in buffers, its logits differ by "
                f"{worst:.1e}: it keeps more than these from token to token, or counts positions by another "
                "way than position_ids"
            )


def longrope_length(config: Any) -> int:
    """Up to how many tokens longrope has its short factors; 0 for other positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = (rope, *(kind for kind in rope.values() if isinstance(kind, Mapping)))  # of layers of several kinds
    lengths = [k.get("original_max_position_embeddings") or 0 for k in kinds if k.get("rope_type") == "longrope"]
    return int(max(lengths, default=0))


_NO_CACHE = "{} is no causal language model that takes a cache of keys and values"


def check_takes_cache(model: Any, max_length: int) -> str:
    """The argument of the cache. ValueError for a model that cannot keep that many tokens in buffers."""
    kind, config, argument = type(model).__name__, model.config, cache_argument(model)
    if argument is None or config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise ValueError(_NO_CACHE.format(kind))
    config = config.get_text_config()
    forgotten = "and older ones would have to be forgotten"
    for name, meaning in (
        ("max_position_embeddings", "positions"),
        ("sliding_window", f"tokens in its sliding window, {forgotten}"),
        ("attention_chunk_size", f"tokens in a chunk of its attention, {forgotten}"),
        ("original_max_position_embeddings", "positions, after which its longrope turns all keys by other angles"),
    ):
        limit = getattr(config, name, None)
        if name == "original_max_position_embeddings":  # of other ways to turn it says nothing about later positions
            limit = longrope_length(config)
        if isinstance(limit, int) and 0 < limit < max_length:
            raise ValueError(f"max_length={max_length}: {kind} has {name}={limit} {meaning}; choose {limit}")
    return argument


def trace_causal_lm(
    func: Callable[[], nn.Module],
    tp_degree: int = 1,
    *,
    max_length: int,
    prompt_lengths: Sequence[int] = (32,),
    batch_size: int = 1,
    **options: Any,
) -> TensorParallelModel:
    """Trace the causal language model that ``func()`` returns, with keys and values that stay on the ranks.

    ``func`` is called in each of ``tp_degree`` processes after ``tpcore.init``, and returns a model of
    transformers that ``parallelize`` has sharded. ``max_length``: how many tokens of each row the cache holds,
    prompt and answer together. ``batch_size``: rows. ``prompt_lengths``: how many tokens of a prompt one
    call takes; there is a program for each, and one for single tokens. Longer prompts take several calls.
    ``options``: those of ``parallel_model_trace``. ``tpcore.trace.generate`` runs the result, by calls of
    ``(input_ids, start, last)`` that return ``(logits,)``.

    ValueError for a model that keeps more than keys and values, or has fewer positions than ``max_length``.
    """
    lengths = sorted({1, *prompt_lengths})
    if lengths[0] < 1 or lengths[-1] > max_length or batch_size < 1:
        raise ValueError(
            f"prompt_lengths={tuple(prompt_lengths)} and batch_size={batch_size} have to be 1 or more, and "
            f"prompts no longer than max_length={max_length}"
        )

    def built() -> tuple[nn.Module, dict[Tensor, int]]:
        model = CachedModel(func(), max_length, batch_size)
        return model, model.aliases()

    rows = torch.zeros(batch_size, dtype=torch.int64)
    # no zeros: a row of the table for padding would leave keys at zero, whatever becomes of them
    examples = [(torch.ones(batch_size, n, dtype=torch.int64), rows, rows) for n in lengths]
    return parallel_model_trace(built, examples[0], tp_degree, bucket_inputs=examples[1:] or None, **options)
