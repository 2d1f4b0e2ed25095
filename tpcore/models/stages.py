"""Divides a cut model's layers into pipeline stages, and chooses the ranks that cut the vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from ..comm.comm import Comm
from ..runtime.context import ParallelContext
from ..train.pipeline import PipelinedLayers, find_layers, pipelined_layers
from . import plan
from .cuts import Cut

_ENDS = (plan.EMBEDDING_ROW, plan.COLUMN_GATHERED)
_WHOLE = ("cache_position",)
"""Arguments of layers whose first dim is never the batch."""


def groups(model: nn.Module, ctx: ParallelContext, stages: int) -> Callable[[Cut], Comm]:
    """The ranks of each cut: tp, or with stages both axes for the vocabulary, which belongs to no stage."""
    tp = ctx.comm("tp")
    if stages == 1:
        return lambda cut: tp
    owner, name = find_layers(model)
    layers = next(n for n, module in model.named_modules() if module is owner.get_submodule(name))
    both = ctx.comm("pp", "tp")
    return lambda cut: both if cut.style in _ENDS and not cut.name.startswith(f"{layers}.") else tp


def number_of_stages(ctx: ParallelContext, num_microbatches: int | None) -> int:
    """The number of stages. ValueError if it is above 1 and ``num_microbatches`` is None."""
    stages = ctx.mesh.axes.get("pp", 1)
    if stages > 1 and num_microbatches is None:
        raise ValueError(
            f"parallelize on pp={stages} stages needs num_microbatches=: into how many parts a batch is cut. "
            f"With 4 times the stages, {4 * stages}, they are idle for a fifth of the time"
        )
    return stages


def into_stages(model: nn.Module, cuts: list[Cut], num_microbatches: int) -> list[Cut]:
    """Keep only this stage's layers in the model; return the cuts of modules that it still has."""
    layers = pipelined_layers(model, num_microbatches)
    layers.shared = _WHOLE
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_no_cache, with_kwargs=True)
    model.register_forward_pre_hook(partial(_same_batch, layers), with_kwargs=True)
    for module in {model, cast(nn.Module, model.base_model)}:
        module.register_forward_pre_hook(_collects_nothing, with_kwargs=True)
    names = {name for name, _ in model.named_modules()}
    return [cut for cut in cuts if cut.name in names]


def _no_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook: a cache of keys and values would mix up microbatches."""
    return args, {"use_cache": False, **kwargs}


def _same_batch(layers: PipelinedLayers, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that compares the stages' batches: ranks that share a vocabulary would mix them up in silence."""
    given = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
    layers.compare({name: t for name, t in given.items() if isinstance(t, Tensor)}, "batch")


def _collects_nothing(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that refuses what transformers collects in the layers: a rank has its stage's, of each microbatch."""
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(model.config, name, False)):
            raise ValueError(
                f"{name}=True with num_microbatches: it is collected in the layers, of which a rank has its stage's "
                "and computes a part of the batch at a time; leave it out, in the configuration too"
            )
