"""transformers' continuous batching, ``generate_batch`` with its paged cache, on a sharded model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Event
from types import MethodType
from typing import Any

from torch import nn

from ..checkpoint.dtensor import device_mesh
from ..runtime.context import ParallelContext
from ..settings import LOCAL_WORLD_SIZE

_SHARE = 0.5
"""The share of a host's free memory that the caches of its ranks may take together."""
_ROWS, _LENGTH = 16, 2048
"""Requests at a time, and tokens of each, where nothing is known of them."""
_TOKENS = 512
"""In one step on a CPU: each costs activations, and a longer step lets all who decode wait."""


def batch_alike(model: nn.Module, ctx: ParallelContext) -> None:
    """Let ``model.init_continuous_batching``, on which ``generate_batch`` is built, know that tp ranks have its heads.

    All ranks call it, and the first rank of the tp group takes the requests.
    """
    original: Callable[..., Any] | None = getattr(type(model), "init_continuous_batching", None)
    if original is None:
        return

    @wraps(original)
    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        config = _sized(continuous_batching_config, self, workload_hints, ctx)
        tp = ctx.comm("tp").size
        if tp == 1:
            return original(self, generation_config, config, workload_hints)
        self.__dict__["_device_mesh"] = device_mesh(ctx, {axis: n for axis, n in ctx.mesh.axes.items() if n > 1})
        try:
            manager = original(self, generation_config, config, workload_hints)
        finally:
            del self.__dict__["_device_mesh"]
        if not manager.is_tp_driver:
            manager._wake_up_loop = _Awake()
        return _over_heads(manager, tp)

    model.__dict__["init_continuous_batching"] = MethodType(init_continuous_batching, model)


def _sized(config: Any, model: Any, hints: Any, ctx: ParallelContext) -> Any:
    """``config`` with sizes that the requests need and that fit: by default each process of a CPU would take most of
    the memory of its host."""
    import psutil
    from transformers import ContinuousBatchingConfig

    config = config or ContinuousBatchingConfig()
    if ctx.device.type == "cpu":
        step = config.max_batch_tokens = config.max_batch_tokens or _TOKENS
        config.max_requests_per_batch = config.max_requests_per_batch or (hints.num_requests if hints else _ROWS)
        if config.num_blocks is None and config.max_memory_percent is None:
            tokens = hints.max_prompt_length + hints.max_generated_length if hints else _LENGTH
            rows = hints.num_requests if hints else _ROWS
            free = int(psutil.virtual_memory().available * _SHARE) // LOCAL_WORLD_SIZE.get()
            needed = rows * (1 + math.ceil(tokens / config.page_size))
            config.num_blocks = max(
                1, min(needed, free // (config.page_size * _bytes(model, ctx.comm("tp").size, step)))
            )
    return config


def _bytes(model: Any, tp: int, step: int) -> int:
    """What one token of the caches takes on a rank: its keys and values there, and, as the engine counts it, their copy
    for attention and its column in two masks of ``step`` rows."""
    config = model.config.get_text_config()
    queries: int = config.num_attention_heads
    heads: int = getattr(config, "num_key_value_heads", None) or queries
    size = getattr(config, "head_dim", None) or config.hidden_size // queries
    kept = 2 * config.num_hidden_layers * max(1, heads // tp) * size
    total: int = (kept + (2 * queries + heads) * size + 2 * step) * model.dtype.itemsize
    return total


class _Awake(Event):
    """Of a rank that takes no requests: between steps it waits for the first rank, in a collective, and not here."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


def _over_heads(manager: Any, tp: int) -> Any:
    """The ``manager``, whose cache has the key and value heads of one rank: at least one, also where there are fewer
    heads than ranks. It divides the number of the configuration by tp, if a plan has the names of projections."""
    manager.distributed_helper.tp_plan = {"layers.*.self_attn.k_proj": "", "layers.*.self_attn.v_proj": ""}
    create = manager._create_batch_processor

    def of_one_rank() -> Any:
        with _divisible(manager.model.config.get_text_config(), tp):
            return create()

    manager._create_batch_processor = of_one_rank
    return manager


@contextmanager
def _divisible(config: Any, tp: int) -> Iterator[None]:
    heads = getattr(config, "num_key_value_heads", None)
    if heads is None or heads % tp == 0:
        yield
        return
    config.num_key_value_heads = tp  # each rank has one head, and several ranks the same
    try:
        yield
    finally:
        config.num_key_value_heads = heads
