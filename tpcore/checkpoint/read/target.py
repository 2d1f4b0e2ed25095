"""Objects that take an entry of a checkpoint by their own ``load_state_dict``: optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ...layout.layout import Layout
from ...runtime.context import ParallelContext
from ...train.zero import ReadRun, Zero1, fitted
from ..format.tree import is_optimizer
from ..tensors.stored import layout_of

OPTIMIZER = "optimizer"
"""The entry that a model's optimizer takes."""


def parameters_of(
    optimizer: torch.optim.Optimizer, ctx: ParallelContext, model: nn.Module | None = None
) -> tuple[Sequence[Layout | None], list[str] | None]:
    """How the parameters are cut, in the order of their groups, and their names if all have one: of their
    own, or those in ``model``."""
    params = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    names = [*chain.from_iterable(group.get("param_names") or () for group in optimizer.param_groups)]
    layouts = [layout_of(p, ctx, f"parameter {i}") for i, p in enumerate(params)]
    if len(names) != len(params) and model is not None:
        known = {id(p): name for name, p in model.named_parameters()}
        names = [known[id(p)] for p in params if id(p) in known]
    return layouts, names if len(names) == len(params) else None


def give(
    target: Any,
    entries: Any,
    runs: Mapping[int, ReadRun],
    key: Any,
    path: str,
    model: nn.Module | None = None,
) -> None:
    """Let ``target`` take its entry out of those that were read. ``model``: whose parameters an optimizer has."""
    if key not in entries:
        raise ValueError(f"{path} has no entry {key!r}; it has {list(entries)}")
    saved = entries.pop(key)
    if isinstance(target, torch.optim.Optimizer) and is_optimizer(saved):
        known = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
        saved = fitted(target, saved, known)
    if isinstance(target, Zero1):
        target.load_outline(saved, runs)
    else:
        target.load_state_dict(saved)
