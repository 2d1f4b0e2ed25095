"""Loading into what takes its whole state at once: an optimizer, a scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...consensus import together
from ...context import ParallelContext, current
from ...errors import CheckpointError
from ...shard import ShardSpec
from ...storage.files import naming
from ..format.cuts import Cut, is_optimizer, spec_of
from ..format.stored import Stored
from ..forms.pickled import in_order, recognised, split
from ..forms.whole import Reading, mapped, open_unsharded, own
from .model import StrPath, read_checkpoint

Saved = Mapping[str, Any]
"""What an optimizer's ``state_dict()`` gave."""


def load_object(
    where: StrPath, target: Any, key: str | None, *, sharded: bool, strict: bool, trust: bool
) -> Any:
    """Give ``target`` the entry ``key``; returns the rest. Collective over the world."""
    is_one = isinstance(target, torch.optim.Optimizer)
    if not hasattr(target, "load_state_dict") or not (sharded or is_one):
        how = "" if sharded else " with sharded=False"
        raise ValueError(f"cannot load into a {type(target).__name__}{how}")
    ctx, path = current(), os.fspath(where)
    found = None
    if is_one:
        with together(ctx), naming("load", path):
            found = _of_others(path, Reading(key, trust, quiet=ctx.rank > 0), sharded, ctx)
    rest = {} if found else read_checkpoint(where, None, key, sharded=True, strict=strict, trust=trust)
    with together(ctx):
        if found is not None:
            states, rest = found
            rest[key] = cut_anew(states, target, ctx, path)
        if key not in rest:
            raise ValueError(f"{path} has no entry {key!r}; it has {list(rest)}")
        target.load_state_dict(rest.pop(key))
    return rest


def _of_others(
    path: str, how: Reading, sharded: bool, ctx: ParallelContext
) -> tuple[list[Saved], dict[Any, Any]] | None:
    """The states of an optimizer on all ranks of another degree, and what else all ranks hold alike.

    None where there is no need for them: the checkpoint is of this library, or of the same degree.
    """
    if not sharded:
        with ExitStack() as stack:
            state, rest = open_unsharded(path, how, stack)
            return [state], own(rest)
    there = recognised(path)
    if there is None or there.tp == ctx.mesh.axes.get("tp", 1):
        return None
    states, rests = there.read(how, there.stage_of(ctx))
    return states, own(split(rests)[0])


def cut_anew(states: Sequence[Saved], optimizer: Any, ctx: ParallelContext, where: str) -> dict[str, Any]:
    """The state of ``optimizer`` on this rank, out of those that it had on each of ``len(states)`` ranks.

    torch numbers an optimizer's parameters in the order of its groups and takes a saved state back by these
    numbers. So they say whose a value is, and the parameter's layer how that is cut. CheckpointError where
    groups or shapes are not those of this optimizer.
    """
    for state in states:
        if not is_optimizer(state):
            raise CheckpointError(f"{where} holds no optimizer's state there, but {list(state)[:8]}")
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
            raise CheckpointError(f"{where}: of parameter {index} the ranks hold different states")
        spec = spec_of(params[index], ctx, f"parameter {index}")
        made[index] = {
            key: _value([s["state"][index][key] for s in states], spec, ctx, f"{where}: state[{index}].{key}")
            for key in values
        }
    return {"state": made, "param_groups": own(first["param_groups"])}


def _value(values: list[Any], spec: ShardSpec | None, ctx: ParallelContext, where: str) -> Any:
    """One value of a parameter's state. What has not the shape of a shard of it is the same on all ranks."""
    if not isinstance(values[0], Tensor):
        return values[0]
    m, shards = len(values), [mapped(value, "state", where) for value in values]
    fits = spec is not None and spec.dim is not None and {s.shape for s in shards} == {spec.local_shape(m)}
    cut: Cut = spec if fits else None
    if spec is not None and fits:
        shards = in_order(shards, spec, where)
    stored = Stored(where, cut, m, None, shards.__getitem__)
    n, rank = ctx.mesh.axes.get("tp", 1), ctx.mesh.coords(ctx.rank).get("tp", 0)
    out = torch.empty(stored.local_shape(None, n), dtype=stored.dtype)
    stored.job(out, None, rank, n).run()
    return out
