"""Inputs of several column layers: copied once if the source shows that nothing else reads them."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from ..layers import ColumnParallelLinear, share_input
from ..layers.attention import InputCopy
from . import plan
from .cuts import Cut
from .source import argument_of_calls

_COLUMNS = (plan.COLUMN, plan.PACKED_COLUMN, plan.QKV_COLUMN)


def columns_by_owner(model: nn.Module, cuts: list[Cut]) -> dict[str, dict[str, ColumnParallelLinear]]:
    """The column layers whose outputs stay parts: by the name of their owner, then by their name in it."""
    found: dict[str, dict[str, ColumnParallelLinear]] = defaultdict(dict)
    for cut in cuts:
        layer = model.get_submodule(cut.name)
        if cut.style in _COLUMNS and isinstance(layer, ColumnParallelLinear):
            found[cut.owner][cut.name.rpartition(".")[2]] = layer
    return found


def shared_argument(owner: nn.Module, columns: dict[str, ColumnParallelLinear]) -> str | None:
    """The argument of ``owner.forward`` that only its column layers read; None if unknown."""
    return argument_of_calls(type(owner).forward, set(columns))


def share_inputs(model: nn.Module, cuts: list[Cut], copy: InputCopy | None = None) -> set[str]:
    """Copy inputs once in the modules where that is certainly correct; return these modules' names."""
    done = set()
    for name, columns in columns_by_owner(model, cuts).items():
        owner = model.get_submodule(name)
        argument = shared_argument(owner, columns)
        if argument is not None and (copy is not None or len(columns) > 1):
            share_input(owner, *columns.values(), argument=argument, copy=copy)
            done.add(name)
    return done
