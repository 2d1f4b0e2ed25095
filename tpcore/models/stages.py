"""Divides a cut model's layers into pipeline stages, and chooses the ranks that cut the vocabulary."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn

from .. import checkpoint
from ..checkpoint.rewrite import consolidate
from ..comm.comm import Comm
from ..runtime.consensus import together
from ..runtime.context import ParallelContext, current
from ..train.pipeline import PipelinedLayers, find_layers, pipelined_layers
from . import plan
from .cuts import Cut
from .whole import bytes_of, drop_weights, save_configuration, save_whole

_ENDS = (plan.EMBEDDING_ROW, plan.COLUMN_GATHERED)
_PARTS = ".stages"
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


def into_stages(model: nn.Module, cuts: list[Cut], num_microbatches: int, stages: int) -> list[Cut]:
    """Keep only this stage's layers in the model; return the cuts of modules that it still has."""
    layers = pipelined_layers(model, num_microbatches)
    layers.shared = _WHOLE
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_NoCache(), with_kwargs=True)
    model.register_forward_pre_hook(_SameBatch(layers), with_kwargs=True)
    for module in {model, cast(nn.Module, model.base_model)}:
        module.register_forward_pre_hook(_collects_nothing, with_kwargs=True)
    if stages > 1:
        model.__dict__["save_pretrained"] = MethodType(_save, model)
    names = {name for name, _ in model.named_modules()}
    return [cut for cut in cuts if cut.name in names]


@dataclass(frozen=True)
class _NoCache:
    """A hook that turns off the cache of keys and values, which would mix up microbatches."""

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {"use_cache": False, **kwargs}


@dataclass(frozen=True)
class _SameBatch:
    """A hook that compares the stages' batches: ranks that share a vocabulary would mix them up in silence."""

    layers: PipelinedLayers

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
        self.layers.compare({name: t for name, t in given.items() if isinstance(t, Tensor)}, "batch")


def _collects_nothing(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that refuses what transformers collects in the layers: a rank has its stage's, of each microbatch."""
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(model.config, name, False)):
            raise ValueError(
                f"{name}=True with num_microbatches: it is collected in the layers, of which a rank has its stage's "
                "and computes a part of the batch at a time; leave it out, in the configuration too"
            )


def _save(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    max_shard_size: int | str = "50GB",
    **options: Any,
) -> None:
    """``model.save_pretrained`` of stages: each writes its part, which rank 0 makes one model of, on disk.

    As ``save_whole`` otherwise; takes twice the space while it works.
    """
    if state_dict is not None or options:
        save_whole(model, save_directory, is_main_process, state_dict, max_shard_size, **options)
        return
    out, ctx = os.path.realpath(save_directory), current()
    parts = os.path.join(out, _PARTS)
    checkpoint.save(model.state_dict(), parts)
    with together(ctx):
        if ctx.rank == 0:
            drop_weights(out)
            consolidate(parts, out, max_shard_size=bytes_of(max_shard_size))
            save_configuration(model, out)
            shutil.rmtree(parts)
