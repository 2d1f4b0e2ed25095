"""Which cut goes on record with each tensor of a state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...context import ParallelContext
from ...layers.sharding import sharding
from ...layout import Layout
from ...mesh import Mesh
from ..format.tree import is_optimizer, parameter_names
from ..tensors.cut import Cut, layout_of

MemoryOf = Callable[[Tensor], object]
"""``Backend.memory_of``: what is equal for tensors that are one."""


def cuts_of(state: Mapping[Any, Any], ctx: ParallelContext) -> Callable[[Tensor, str], Cut]:
    """What goes on record with each tensor of a state to be saved.

    An entry that a plain module made of a parallel layer's parameter (as ``cls.predictions.bias`` of
    transformers' BERT) has no mark of its own, but is the memory of one that has.
    """
    memory_of = ctx.backend.memory_of
    marked: dict[object, Tensor] = {}
    for model in (state, *state.values()) if isinstance(state, Mapping) else ():
        if isinstance(model, Mapping) and not is_optimizer(model):
            for t in model.values():
                if isinstance(t, Tensor) and sharding(t) is not None and not t.is_meta:
                    marked[memory_of(t)] = t
    cuts = optimizer_cuts(state, marked, ctx.mesh, memory_of) if isinstance(state, Mapping) else {}
    return lambda t, where: layout_of(marked.get(memory_of(t), t), ctx, where) or cuts.get(id(t))


def optimizer_cuts(
    state: Mapping[Any, Any], marked: Mapping[object, Tensor], mesh: Mesh, memory_of: MemoryOf
) -> dict[int, Cut]:
    """By ``id``: cuts of the tensors in optimizers' state_dicts, which are those of their parameters.

    An optimizer numbers its parameters. They have names where it was made from ``named_parameters()``
    (torch 2.6 or newer); where not, the cut is unknown. What has another shape than its parameter, a step
    count say, is left to the general rule.
    """
    known = _by_name(state, marked, memory_of)
    cuts: dict[int, Cut] = {}
    for optimizer in state.values():
        if not is_optimizer(optimizer):
            continue
        names = dict(parameter_names(optimizer["param_groups"]))
        for index, values in optimizer["state"].items():
            if not isinstance(values, Mapping):
                continue
            spec = known.get(names.get(index, ""))
            for value in values.values():
                if isinstance(value, Tensor) and value.ndim:
                    fits = spec is not None and tuple(value.shape) == spec.local_shape(mesh)
                    cuts[id(value)] = spec if fits else "unknown"
    return cuts


def _by_name(
    state: Mapping[Any, Any], marked: Mapping[object, Tensor], memory_of: MemoryOf
) -> dict[str, Layout]:
    """Cuts of the parameters in the models' state_dicts, but for names that two of them use differently."""
    found: dict[str, set[Layout]] = defaultdict(set)
    for model in (state, *state.values()):
        if isinstance(model, Mapping) and not is_optimizer(model):
            for name, t in model.items():
                if isinstance(t, Tensor) and isinstance(name, str):
                    cut = sharding(t if t.is_meta else marked.get(memory_of(t), t))
                    found[name].add(cut.layout if cut else Layout(tuple(t.shape)))
    return {name: specs.pop() for name, specs in found.items() if len(specs) == 1}
