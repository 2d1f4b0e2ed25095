"""Loads objects that take their whole state at once, such as optimizers and schedulers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...runtime.consensus import together
from ...runtime.context import ParallelContext, current
from ...train.zero import Zero1, renumbered
from ..format.tree import is_optimizer
from ..forms.pickles import in_own_memory, mapped
from ..forms.rank_files import in_order
from ..forms.registry import open_source
from ..forms.source import Reading
from ..storage.files import naming
from ..tensors.stored import Stored, layout_of
from .model import Loading, StrPath
from .target import give, parameters_of

Saved = Mapping[str, Any]
"""An optimizer's ``state_dict()``."""


def load_object(where: StrPath, target: Any, how: Reading, *, sharded: bool, strict: bool) -> Any:
    """Load entry ``how.model_key`` into ``target``. Returns the other entries. Collective over the world."""
    optimizer = target if isinstance(target, torch.optim.Optimizer) else None
    if not hasattr(target, "load_state_dict") or not (sharded or optimizer):
        suffix = "" if sharded else " with sharded=False"
        raise ValueError(f"cannot load into a {type(target).__name__}{suffix}")
    ctx, path, key = current(), os.fspath(where), how.model_key
    later = key if isinstance(target, Zero1) else None
    with ExitStack() as stack:
        with together(ctx), naming("load", path):
            source = open_source(path, how, stack, sharded=sharded)
            loading = Loading(ctx, source, strict=strict, sharded=sharded)
            states, rest = loading.states() if optimizer else (None, {})
            if states is None:
                layouts, names = parameters_of(optimizer, ctx) if optimizer else ((), None)
                loading.compare(None, layouts, names, key if loading.restaged else None, later)
        if states is None:
            return loading.run(lambda rest, runs: give(target, rest, runs, key, path))
    with together(ctx):
        rest[key] = cut_anew(states, optimizer, ctx, path)
        give(target, rest, {}, key, path)
    return rest


def cut_anew(states: Sequence[Saved], optimizer: Any, ctx: ParallelContext, where: str) -> dict[str, Any]:
    """The state of ``optimizer`` on this rank, from the saved states of ``len(states)`` ranks.

    torch numbers an optimizer's parameters in the order of its groups. The number of a saved value gives its parameter,
    and the parameter's layer gives its cut. CheckpointError if groups or shapes are not those of this optimizer.
    """
    for state in states:
        if not is_optimizer(state):
            raise CheckpointError(f"{where} has no optimizer's state there, but {list(state)[:8]}")
    states = [renumbered(state, optimizer.param_groups, {}) for state in states]
    first = states[0]
    saved = [group["params"] for group in first["param_groups"]]
    here = [group["params"] for group in optimizer.param_groups]
    if [*map(len, saved)] != [*map(len, here)]:
        raise CheckpointError(
            f"{where}: the optimizer that was saved has groups of {[*map(len, saved)]} parameters, "
            f"this one of {[*map(len, here)]}"
        )
    params = dict(zip(chain(*saved), chain(*here), strict=True))
    made: dict[Any, Any] = {}
    for index, values in first["state"].items():
        if index not in params or any(s["state"].get(index, {}).keys() != values.keys() for s in states):
            raise CheckpointError(f"{where}: the ranks hold different states of parameter {index}")
        want = layout_of(params[index], ctx, f"parameter {index}")
        made[index] = {
            key: _value([s["state"][index][key] for s in states], want, ctx, f"{where}: state[{index}].{key}")
            for key in values
        }
    return {"state": made, "param_groups": in_own_memory(first["param_groups"])}


def _value(values: list[Any], layout: Layout | None, ctx: ParallelContext, where: str) -> Any:
    """One value of a parameter's state. A tensor that has not the shape of the parameter's shard is uncut."""
    if not isinstance(values[0], Tensor):
        return values[0]
    m, shards = len(values), [mapped(value, "state", where) for value in values]
    cut = layout.cuts[0].spec if layout is not None and layout.cuts and layout.cuts[0].axes != ("ep",) else None
    if cut is not None and {s.shape for s in shards} == {cut.local_shape(m)}:
        shards = in_order(shards, cut, where)
    else:
        cut = layout = None
    stored = Stored.over_tp(where, cut, m, None, shards.__getitem__)
    return stored.plan(layout, ctx.rank, ctx.mesh).tensor()
