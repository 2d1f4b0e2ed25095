"""Loads a checkpoint into a model, and its entries into objects that take their whole state: optimizers, schedulers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...runtime.consensus import together
from ...runtime.context import ParallelContext, current
from ...train.zero import ReadRun, Zero1, fitted, renumbered
from ..format.tree import is_optimizer
from ..forms.pickles import in_own_memory, mapped
from ..forms.rank_files import in_order
from ..forms.registry import open_source
from ..forms.source import Reading
from ..storage.files import naming
from ..tensors.stored import Stored, layout_of
from .model import Loading

StrPath = str | os.PathLike[str]
OPTIMIZER = "optimizer"
"""The entry that a model's optimizer takes."""
Saved = Mapping[str, Any]
"""An optimizer's ``state_dict()``."""


def read_checkpoint(
    load_dir: StrPath,
    model: Any,
    how: Reading,
    *,
    sharded: bool,
    strict: bool,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Load a checkpoint; see ``tpcore.checkpoint.load``. Collective over the world."""
    target, key, module = _targets(model, optimizer, how, sharded)
    ctx, path = current(), os.fspath(load_dir)
    if "tp" in ctx.mesh.axes:
        ctx.comm("tp")  # the first use of a group is collective, and here all ranks take part
    optimizer = target if isinstance(target, torch.optim.Optimizer) else None
    with ExitStack() as stack:
        with together(ctx), naming("load", path):
            source = open_source(path, how, stack, sharded=sharded)
            loading = Loading(ctx, source, strict=strict, sharded=sharded)
            states, rest = loading.states() if module is None and optimizer is not None else (None, {})
            if states is None:
                layouts, names = ((), None) if optimizer is None else parameters_of(optimizer, ctx, module)
                only = key if module is None and target is not None and loading.restaged else None
                loading.compare(module, layouts, names, only, key if isinstance(target, Zero1) else None)
        if states is None:
            if target is None:
                return loading.run()
            return loading.run(lambda rest, runs: give(target, rest, runs, key, path, module))
    with together(ctx):
        rest[key] = cut_anew(states, optimizer, ctx, path)
        give(target, rest, {}, key, path)
    return rest


def _targets(
    model: Any, optimizer: torch.optim.Optimizer | None, how: Reading, sharded: bool
) -> tuple[Any, Any, nn.Module | None]:
    """What takes an entry by its ``load_state_dict``, and the entry's key; and the model."""
    if isinstance(model, nn.Module):
        return optimizer, OPTIMIZER, model
    if optimizer is not None:
        raise ValueError(
            "optimizer= goes with a model, load(path, model, optimizer=optimizer); alone it is "
            'load(path, optimizer, model_key="optimizer")'
        )
    if model is None and not sharded:
        raise ValueError("sharded=False needs a model: its layers say which part of a tensor is this rank's")
    if model is not None and not (
        hasattr(model, "load_state_dict") and (sharded or isinstance(model, torch.optim.Optimizer))
    ):
        raise ValueError(f"cannot load into a {type(model).__name__}" + ("" if sharded else " with sharded=False"))
    return model, how.model_key, None


def parameters_of(
    optimizer: torch.optim.Optimizer, ctx: ParallelContext, model: nn.Module | None = None
) -> tuple[Sequence[Layout | None], list[str] | None]:
    """How the parameters are cut, in order, and their names if all have one: of their own, or those in ``model``."""
    params = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    names = [*chain.from_iterable(group.get("param_names") or () for group in optimizer.param_groups)]
    layouts = [layout_of(p, ctx, f"parameter {i}") for i, p in enumerate(params)]
    if len(names) != len(params) and model is not None:
        known = {id(p): name for name, p in model.named_parameters()}
        names = [known[id(p)] for p in params if id(p) in known]
    return layouts, names if len(names) == len(params) else None


def give(
    target: Any, entries: Any, runs: Mapping[int, ReadRun], key: Any, path: str, model: nn.Module | None = None
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


def cut_anew(states: Sequence[Saved], optimizer: Any, ctx: ParallelContext, where: str) -> dict[str, Any]:
    """The state of ``optimizer`` on this rank, from the saved states of ``len(states)`` ranks. A saved value is cut
    like the parameter of its number. CheckpointError if groups or shapes are not those of this optimizer."""
    for state in states:
        if not is_optimizer(state):
            raise CheckpointError(f"{where} has no optimizer's state there, but {list(state)[:8]}")
    states = [renumbered(state, optimizer.param_groups, {}) for state in states]
    first = states[0]
    saved, here = ([group["params"] for group in groups] for groups in (first["param_groups"], optimizer.param_groups))
    sizes, wanted = [*map(len, saved)], [*map(len, here)]
    if sizes != wanted:
        raise CheckpointError(f"{where}: the saved optimizer has groups of {sizes} parameters, this one of {wanted}")
    params = dict(zip(chain(*saved), chain(*here), strict=True))
    recut: dict[Any, Any] = {}
    for index, values in first["state"].items():
        if index not in params or any(s["state"].get(index, {}).keys() != values.keys() for s in states):
            raise CheckpointError(f"{where}: the ranks hold different states of parameter {index}")
        want = layout_of(params[index], ctx, f"parameter {index}")
        recut[index] = {
            key: _value([s["state"][index][key] for s in states], want, ctx, f"{where}: state[{index}].{key}")
            for key in values
        }
    return {"state": recut, "param_groups": in_own_memory(first["param_groups"])}


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
