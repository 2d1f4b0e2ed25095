"""``generate`` and continuous batching of a sharded model: all ranks choose the same tokens."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import wraps
from threading import Event
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.checkpoint.dtensor import device_mesh
from tpcore.comm.comm import Comm
from tpcore.errors import BackendError
from tpcore.runtime.consensus import gather_bytes
from tpcore.runtime.context import ParallelContext
from tpcore.runtime.digests import compare_ranks
from tpcore.runtime.random import get_state, set_state
from tpcore.settings import LOCAL_WORLD_SIZE

from .. import private
from ..plan.inputs import cache_of

_SHARE = 0.5
"""The share of a host's free memory that the caches of its ranks may take together."""
ROWS, LENGTH = 16, 2048
"""Requests at a time, and tokens of each, where nothing is known of them."""
_TOKENS = 512
"""In one step on a CPU: each costs activations, and a longer step lets all who decode wait."""


def batch_alike(model: nn.Module, ctx: ParallelContext) -> None:
    """Let ``model.init_continuous_batching``, on which ``generate_batch`` is built, know that tp ranks have its heads.
    All ranks call it, and the first rank of the tp group takes the requests."""
    original: Callable[..., Any] | None = getattr(type(model), "init_continuous_batching", None)
    if original is None:
        return

    @wraps(original)
    def init_continuous_batching(
        self: Any, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        others = [axis for axis in ("pp", "ep", "cp") if ctx.mesh.axes.get(axis, 1) > 1]
        if others:
            raise ValueError(
                f"continuous batching over {' and '.join(others)}: each tp group steps by itself, and these ranks "
                "would wait for one another; shard the model over tp alone, or call generate"
            )
        self.eval()
        heads = heads_of_rank(self)
        config = cache_config(continuous_batching_config, self, workload_hints, heads, ctx)
        if ctx.comm("tp").size == 1:
            return _with_heads(_paged(original(self, generation_config, config, workload_hints), heads), heads)
        self.__dict__["_device_mesh"] = device_mesh(ctx, {axis: n for axis, n in ctx.mesh.axes.items() if n > 1})
        try:
            manager = original(self, generation_config, config, workload_hints)
        finally:
            del self.__dict__["_device_mesh"]
        if not manager.is_tp_driver:
            private.set_wake_up(manager, _Awake())
        return _with_heads(_paged(manager, heads), heads)

    model.__dict__["init_continuous_batching"] = MethodType(init_continuous_batching, model)


def heads_of_rank(model: Any) -> int:
    """How many key and value heads a rank has, whatever the plan has made of them: as its cache of one token says."""
    ids = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        cache = cache_of(model(input_ids=ids, use_cache=True))
    keys = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", ())]
    heads = {t.shape[1] for t in keys if isinstance(t, Tensor) and t.ndim == 4}
    if len(heads) != 1:
        raise ValueError(
            f"{type(model).__name__} has layers with {sorted(heads)} key and value heads on a rank: the paged cache of "
            "continuous batching has one number for all; call generate"
        )
    return int(heads.pop())


def _paged(manager: Any, heads: int) -> Any:
    """The ``manager``, if its model's attention takes the keys and values of earlier tokens from the paged cache.
    ValueError for attention of its own, which would see those of other requests, for sizes that the cache has not, and
    for models that ask more of it than it has.
    """
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    found: set[tuple[int, int, int]] = set()
    takes = inspect.signature(PagedAttentionCache.update)
    places = {name: None for name in takes.parameters if name.endswith("_index")}  # in releases before 5.23

    class Cache(PagedAttentionCache):  # attention functions ask for this class
        def __init__(self) -> None:
            pass

        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = [*takes.bind(self, *args, **kwargs).arguments.values()][1:3]
            found.add((keys.shape[1], keys.shape[3], values.shape[3]))
            # with places tokens come first, without a batch
            return tuple(t.transpose(1, 2).flatten(0, 1) if places else t for t in (keys, values))

    model, kind = manager.model, type(manager.model).__name__
    config, implementation = model.config.get_text_config(), str(getattr(model.config, private.ATTENTION))
    capped = getattr(config, "attn_logit_softcapping", None) and "flash" not in implementation
    ids = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    size, error = _head_size(config), ""
    try:
        with torch.no_grad():
            model(input_ids=ids, position_ids=ids - 1, use_cache=False, cache=Cache(), **places)
    except BackendError:
        raise
    except Exception as e:  # noqa: BLE001  whatever a model does with a cache that is not what it expects
        error = f"asks something else of its cache ({type(e).__name__}: {e})"
    if found == {(heads, size, size)} and not capped and not error:
        return manager
    if manager._original_attn_impl is not None:  # as manager.stop() does, of one that has started
        model.set_attn_implementation(manager._original_attn_impl)
    why = f"has heads with keys and values of sizes {sorted(s[1:] for s in found)}, and the cache one of {size}"
    if capped:
        why = f"has capped scores, which its attention {implementation!r} leaves out"
    if error or not found:
        why = error or "has attention of its own, which leaves keys and values out of the cache"
    raise ValueError(
        f"continuous batching with its paged cache: {kind} {why}; call generate, or tpcore_hf.trace_causal_lm"
    )


def cache_config(config: Any, model: Any, hints: Any, heads: int, ctx: ParallelContext) -> Any:
    """``config`` with sizes that the requests need and that fit: by default each process of a CPU would take most of
    the memory of its host."""
    import psutil
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig() if config is None else copy.deepcopy(config)
    if ctx.device.type == "cpu":
        step = config.max_batch_tokens = config.max_batch_tokens or _TOKENS
        config.max_requests_per_batch = config.max_requests_per_batch or (hints.num_requests if hints else ROWS)
        if config.num_blocks is None and config.max_memory_percent is None:
            tokens = hints.max_prompt_length + hints.max_generated_length if hints else LENGTH
            rows = hints.num_requests if hints else ROWS
            free = int(psutil.virtual_memory().available * _SHARE) // LOCAL_WORLD_SIZE.get()
            page = config.page_size if hasattr(config, "page_size") else config.block_size  # its first name
            needed = rows * (1 + math.ceil(tokens / page))
            config.num_blocks = max(1, min(needed, free // (page * _bytes(model, heads, step))))
    return config


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _bytes(model: Any, heads: int, step: int) -> int:
    """What one token of the caches takes on a rank: its keys and values there, and, as the engine counts it, their copy
    for attention and its column in two masks of ``step`` rows."""
    config = model.config.get_text_config()
    queries, size = config.num_attention_heads, _head_size(config)
    cached, copied = 2 * config.num_hidden_layers * heads * size, (2 * queries + heads) * size
    return int((cached + copied + 2 * step) * model.dtype.itemsize)


class _Awake(Event):
    """Of a rank that takes no requests: between steps it waits for the first rank, in a collective, and not here."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


def _with_heads(manager: Any, heads: int) -> Any:
    """The ``manager``, whose cache has ``heads``. It takes the number of the configuration, and divides it by tp where
    a plan has the names of projections."""
    manager.distributed_helper.tp_plan = {}
    model, create = manager.model, manager._create_batch_processor
    config = model.config.get_text_config()

    def of_one_rank() -> Any:
        before, plan = vars(config).get("num_key_value_heads"), model._tp_plan
        config.num_key_value_heads, model._tp_plan = heads, {}  # the plan: releases before 5.23 ask the model
        try:
            return create()
        finally:
            config.num_key_value_heads, model._tp_plan = before, plan
            if before is None:
                del config.num_key_value_heads

    manager._create_batch_processor = of_one_rank
    return manager


def _check_alike(model: Any, comm: Comm, arguments: dict[Any, Any]) -> None:
    """ValueError for texts that the ranks of ``comm`` would not write together."""
    if comm.size == 1:
        return
    configs = (model.generation_config, arguments.get("generation_config", arguments.get(1)))
    seconds = arguments.get("max_time") or next((s for c in configs if (s := getattr(c, "max_time", None))), None)
    if seconds:
        raise ValueError(
            f"generate with max_time={seconds} over {comm.size} ranks: each has a clock of its own, and would stop at "
            "another token; give max_new_tokens"
        )
    if not comm.eager:  # where each length of a prompt would compile programs
        return
    prompts = {"inputs" if name == 0 else str(name): t for name, t in arguments.items() if isinstance(t, Tensor)}
    compare_ranks(
        prompts, comm, "generate: ranks {} and {} of one text", "each rank of tp and pp passes the whole prompts"
    )


def _unknown() -> None:
    """The heads of a cache that has seen no token."""


def generate_alike(model: nn.Module, comm: Comm, experts: Comm) -> None:
    """Let ``model.generate`` draw the numbers of the first rank of ``comm`` on all of them, whatever their
    seeds. Samples, beams and guesses then agree, as the ranks' logits do. Ranks of ``experts``, which have other
    prompts, go on until the last of them is done: each computes some of the others' experts."""
    original: Callable[..., Any] | None = getattr(type(model), "generate", None)
    if original is None:
        return

    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_alike(self, comm, dict(enumerate(args)) | kwargs)
        state = get_state()
        for name, t in state.items():
            first = gather_bytes(t.cpu().numpy().tobytes(), comm)[0]
            state[name] = torch.frombuffer(bytearray(first), dtype=t.dtype).view(t.shape)
        set_state(state)
        if experts.size > 1:
            kwargs.setdefault("synced_gpus", True)
        return original(self, *args, **kwargs)

    def has_unfinished_sequences(self: nn.Module, this_peer_finished: bool, synced_gpus: bool, device: Any) -> bool:
        left = torch.tensor([not this_peer_finished], dtype=torch.int64, device=device)
        return bool((experts.all_reduce(left, "max") if synced_gpus else left).item())

    model.__dict__["generate"] = MethodType(generate, model)
    # static caches are sized by what comes first: the configuration has the heads of all ranks
    model.__dict__["_get_static_cache_init_shape"] = _unknown
    if experts.size > 1:  # transformers' own asks torch.distributed, of all ranks
        model.__dict__["_has_unfinished_sequences"] = MethodType(has_unfinished_sequences, model)
