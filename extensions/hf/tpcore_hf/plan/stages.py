"""A model on stages: its number of them, this stage's layers, and what no stage can give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from tpcore.runtime.context import ParallelContext
from tpcore.train.pipeline import PipelinedLayers, pipelined_layers

from .decisions import Cut
from .inputs import takes


def number_of_stages(ctx: ParallelContext, num_microbatches: int | None) -> int:
    """The number of stages. ValueError if it is above 1 and ``num_microbatches`` is None."""
    stages = ctx.mesh.axes.get("pp", 1)
    if stages > 1 and num_microbatches is None:
        raise ValueError(
            f"parallelize on pp={stages} stages needs num_microbatches=: into how many parts a batch is cut. "
            f"With 4 times the stages, {4 * stages}, they are idle for a fifth of the time"
        )
    return stages


def into_stages(
    model: nn.Module, cuts: list[Cut], num_microbatches: int | None, layers_per_stage: Sequence[int] | str | None
) -> list[Cut]:
    """Keep only this stage's layers in the model; return the cuts of modules that it still has."""
    if num_microbatches is None:
        return cuts
    layers = pipelined_layers(model, num_microbatches, layers_per_stage)
    layers.shared = ("cache_position",)  # whose first dim is never the batch
    if takes(model, "use_cache"):
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
    arguments = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
    layers.compare({name: t for name, t in arguments.items() if isinstance(t, Tensor)}, "batch")


def _collects_nothing(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that refuses what transformers collects in the layers: a rank has its stage's, of each microbatch."""
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(model.config, name, False)):
            raise ValueError(
                f"{name}=True with num_microbatches: it is collected in the layers, of which a rank has its stage's "
                "and computes a part of the batch at a time; leave it out, in the configuration too"
            )
