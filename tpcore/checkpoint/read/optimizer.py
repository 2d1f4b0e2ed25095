"""The layouts of an optimizer's stored state: those of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...runtime.context import ParallelContext
from ...train.zero import renumbered
from ..forms.pickles import in_own_memory, mapped
from ..forms.rank_files import in_order
from ..forms.source import OfParameter
from ..stored import Stored, layout_of
from ..tree import is_optimizer


def parameter_layouts(
    optimizer: torch.optim.Optimizer, ctx: ParallelContext, model: nn.Module | None
) -> tuple[dict[int, Layout | None], list[str] | None]:
    """By number; and the parameters' names in order, of their own or in ``model``, if all have one."""
    params = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    names = [*chain.from_iterable(group.get("param_names") or () for group in optimizer.param_groups)]
    layouts = {i: layout_of(p, ctx, f"parameter {i}") for i, p in enumerate(params)}
    if len(names) != len(params) and model is not None:
        known = {id(p): name for name, p in model.named_parameters()}
        names = [known[id(p)] for p in params if id(p) in known]
    return layouts, names if len(names) == len(params) else None


def layouts_here(
    tensors: Sequence[OfParameter], by_name: Mapping[str, Layout], by_number: Mapping[int, Layout | None]
) -> tuple[dict[Stored, Layout], set[Any]]:
    """The layouts of optimizers' ``tensors`` on this mesh, each that of its parameter; and the keys of optimizers with
    a tensor whose parameter is not known."""
    layouts: dict[Stored, Layout] = {}
    unknown = set()
    for of in tensors:
        want = by_name.get(of.name) if by_name and of.name else by_number.get(of.number)
        if want is not None and isinstance(of.stored.layout, Layout):
            if of.stored.layout.shape == want.shape:
                layouts[of.stored] = want
        elif of.stored.first.shape:
            unknown.add(of.key)
    return layouts, unknown


def state_here(
    states: Sequence[Mapping[str, Any]],
    optimizer: Any,
    ctx: ParallelContext,
    where: str,
    memory: Callable[[Stored, Layout | None], Tensor] | None = None,
) -> dict[str, Any]:
    """The state of ``optimizer`` on this rank, from the saved states of ``len(states)`` ranks. A saved value is sharded
    like the parameter of its number. ``memory``: for what is stored, in the layout that is wanted; None: it is read.
    CheckpointError if groups or shapes are not those of this optimizer."""
    for state in states:
        if not is_optimizer(state):
            raise CheckpointError(f"{where} has no optimizer's state there, but {list(state)[:8]}")
    read = memory or (lambda stored, layout: stored.plan(layout, ctx.rank, ctx.mesh).tensor())
    states = [renumbered(state, optimizer.param_groups, {}) for state in states]
    first = states[0]
    saved, here = ([group["params"] for group in groups] for groups in (first["param_groups"], optimizer.param_groups))
    sizes, wanted = [*map(len, saved)], [*map(len, here)]
    if sizes != wanted:
        raise CheckpointError(f"{where}: the saved optimizer has groups of {sizes} parameters, this one of {wanted}")
    params = dict(zip(chain(*saved), chain(*here), strict=True))
    new: dict[Any, Any] = {}
    for index, values in first["state"].items():
        if index not in params or any(s["state"].get(index, {}).keys() != values.keys() for s in states):
            raise CheckpointError(f"{where}: the ranks hold different states of parameter {index}")
        want = layout_of(params[index], ctx, f"parameter {index}")
        new[index] = {
            key: read(*_stored([s["state"][index][key] for s in states], want, f"{where}: state[{index}].{key}"))
            if isinstance(value, Tensor)
            else value
            for key, value in values.items()
        }
    return {"state": new, "param_groups": in_own_memory(first["param_groups"])}


def _stored(values: list[Any], layout: Layout | None, where: str) -> tuple[Stored, Layout | None]:
    """One value of a parameter's state. A tensor that has not the shape of the parameter's shard is not sharded."""
    m, shards = len(values), [mapped(value, "state", where) for value in values]
    spec = layout.cuts[0].spec if layout is not None and layout.cuts and layout.cuts[0].axes != ("ep",) else None
    if spec is not None and {s.shape for s in shards} == {spec.local_shape(m)}:
        shards = in_order(shards, spec, where)
    else:
        spec = layout = None
    return Stored.over_tp(where, spec, m, None, shards.__getitem__), layout
