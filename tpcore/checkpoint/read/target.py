"""Objects that take an entry of a checkpoint by their own ``load_state_dict``: optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ...context import ParallelContext
from ...errors import CheckpointError
from ...layout import Layout
from ...train.zero import GRADIENT, ReadRun, Zero1
from ..format.tree import is_optimizer
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
        return
    taken = entries.pop(key)
    if isinstance(target, torch.optim.Optimizer):
        taken = _with_gradients_given(target, taken, path)
    target.load_state_dict(taken)


def _with_gradients_given(optimizer: torch.optim.Optimizer, saved: Any, path: str) -> Any:
    """Set ``.grad`` to the gradients in ``saved``, the state of a Zero1 between the backwards of one step;
    return the rest. CheckpointError if a gradient would be rounded."""
    if not is_optimizer(saved):
        return saved
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    states = {number: dict(values) for number, values in saved["state"].items()}
    for number, p in zip(numbers, params, strict=False):  # load_state_dict refuses other numbers
        gradient = states.get(number, {}).pop(GRADIENT, None)
        if gradient is None:
            continue
        if torch.promote_types(gradient.dtype, p.dtype) != p.dtype:
            raise CheckpointError(
                f"{path} was saved between the backwards of one step, with gradients in {gradient.dtype}, "
                f"and those of parameter {number} are in {p.dtype} here, which would round them: load into "
                f"tpcore.Zero1(..., grad_dtype={gradient.dtype}), as the one that was saved"
            )
        given.append((p, gradient))
    for p, gradient in given:
        p.grad = gradient.to(p.device, p.dtype)
    return {**saved, "state": {number: values for number, values in states.items() if values}}
