"""Replaces optimizers in a state to save by their ``state_dict()``, cut like their parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...layout.layout import Layout
from ...runtime.context import ParallelContext
from ...train.zero import Zero1
from ..format.tree import is_optimizer, model_tensors
from ..tensors.stored import layout_of


@dataclass(frozen=True)
class Resolved:
    """A state with ``state_dict()``s in place of optimizers. By ``id`` of a tensor in them: ``cuts``, its layout;
    ``gather``, of one on meta that stands for the parts of dp ranks, what gathers the values, collective over dp."""

    state: Any
    cuts: dict[int, Layout] = field(default_factory=dict)
    gather: dict[int, Callable[[], Tensor]] = field(default_factory=dict)


def resolve(state: Any, ctx: ParallelContext) -> Resolved:
    """Replace the optimizers in ``state``. ValueError if one of a pipeline stage has unnamed parameters, or a
    Zero1 gradients that no step has used. At pp=1 a warning says where an unnamed state can be loaded."""
    optimizers = {
        key: value
        for key, value in (state.items() if isinstance(state, Mapping) else ())
        if isinstance(value, torch.optim.Optimizer) or is_optimizer(value)
    }
    found = Resolved(dict(state) if optimizers else state)
    for key, value in optimizers.items():
        where = "at another degree"
        if isinstance(value, torch.optim.Optimizer):
            found.state[key], where = _resolved(value, found, ctx), "at another number of pipeline stages"
            _name(value, found.state[key], state, ctx, key)
        _warn_of_no_names(key, found.state[key], ctx, where)
    return found


def _warn_of_no_names(key: Any, saved: Mapping[str, Any], ctx: ParallelContext, where: str) -> None:
    """Now, while the job that can name them runs, and not when the checkpoint is opened elsewhere."""
    states = [values for values in saved["state"].values() if isinstance(values, Mapping)]
    kept = any(isinstance(t, Tensor) and t.ndim for values in states for t in values.values())
    named = all(group.get("param_names") or not group["params"] for group in saved["param_groups"])
    if kept and not named and ctx.rank == 0:
        warnings.warn(
            f"{key!r} is saved without the names of its parameters, and cannot be loaded {where}. Save the "
            "optimizer itself with model.state_dict(), or make it from model.named_parameters()",
            stacklevel=2,
        )


def _resolved(optimizer: torch.optim.Optimizer, found: Resolved, ctx: ParallelContext) -> dict[str, Any]:
    if isinstance(optimizer, Zero1):
        outline = optimizer.outline()
        saved: dict[str, Any] = outline.state
        found.gather.update(outline.gather)
    else:
        saved = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in saved["state"].items():
        p = parameters[number]
        layout = layout_of(p, ctx, f"parameter {number}") or Layout(tuple(p.shape))
        tensors = (value for value in values.values() if isinstance(value, Tensor))
        found.cuts.update((id(t), layout) for t in tensors if t.ndim and t.shape == p.shape)
    return saved


def _name(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], state: Mapping[Any, Any], ctx: ParallelContext, key: Any
) -> None:
    """Give unnamed parameters in ``saved`` their names in the model that is saved with the optimizer."""
    names: dict[object, str] = {}
    for name, t in model_tensors(state):
        if isinstance(name, str):
            names.setdefault(ctx.backend.memory_of(t), name)
    for group, mine in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        known = [names.get(ctx.backend.memory_of(p)) for p in mine["params"]]
        if group.get("param_names") or not known:
            continue
        if None not in known:
            group["param_names"] = known
        elif ctx.mesh.axes.get("pp", 1) > 1:
            raise ValueError(
                f"cannot save {key!r}: the parameters of its optimizer have no names, without which a job of "
                "other pipeline stages could not tell whose values it holds. Make the optimizer from "
                "model.named_parameters(), or save model.state_dict() with it"
            )
