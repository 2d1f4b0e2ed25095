"""Divides a cut model's layers into pipeline stages, and chooses the ranks that cut the vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from ..comm import Comm
from ..context import ParallelContext
from ..train.pipeline import find_layers, pipelined_layers
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


def into_stages(model: nn.Module, cuts: list[Cut], num_microbatches: int, stages: int) -> list[Cut]:
    """Keep only this stage's layers in the model; return the cuts of modules that it still has."""
    layers = pipelined_layers(model, num_microbatches)
    layers.shared = _WHOLE
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_NoCache(), with_kwargs=True)
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


def _save(model: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"the layers of this {type(model).__name__} lie on several pipeline stages: save with "
        "tpcore.checkpoint.save, and let `tpcore checkpoint consolidate` make files that transformers opens"
    )
