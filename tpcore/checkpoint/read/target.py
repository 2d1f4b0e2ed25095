"""Objects that take an entry of a checkpoint by their own ``load_state_dict``: optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ...context import ParallelContext
from ...layout import Layout
from ...train.zero import ReadRun, Zero1
from ..tensors.stored import layout_of

OPTIMIZER = "optimizer"
"""The entry that a model's optimizer takes."""


def parameters_of(
    optimizer: torch.optim.Optimizer, ctx: ParallelContext
) -> tuple[Sequence[Layout | None], list[str] | None]:
    """How the parameters are cut, in the order of their groups, and their names if all have one."""
    params = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    names = [*chain.from_iterable(group.get("param_names") or () for group in optimizer.param_groups)]
    layouts = [layout_of(p, ctx, f"parameter {i}") for i, p in enumerate(params)]
    return layouts, names if len(names) == len(params) else None


def give(target: Any, entries: Any, runs: Mapping[int, ReadRun], key: Any, path: str) -> None:
    """Let ``target`` take its entry out of those that were read."""
    if key not in entries:
        raise ValueError(f"{path} has no entry {key!r}; it has {list(entries)}")
    if isinstance(target, Zero1):
        target.load_outline(entries.pop(key), runs)
    else:
        target.load_state_dict(entries.pop(key))
