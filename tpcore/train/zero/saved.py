"""Fits an optimizer's saved state to the optimizer that takes it: whose state is whose, and of what kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .elementwise import tried
from .state import MASTER, check_shape, refuse_sums

Saved = Mapping[str, Any]
"""An optimizer's ``state_dict()``."""


def renumbered(saved: Saved, groups: Sequence[dict[str, Any]], known: Mapping[str, Tensor]) -> Saved:
    """``saved`` with its parameters in the order of ``groups``, by name; unchanged if one side has no names.

    ``known``: further names of parameters, those of their model. ValueError if the names are others. Names
    may have one prefix more or less, as those of a wrapped model have.
    """
    saved_groups = saved["param_groups"]
    if not all(len(g.get("param_names") or ()) == len(g["params"]) for g in saved_groups):
        return saved
    place = {id(p): (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
    here = {name: place[id(p)] for name, p in known.items() if id(p) in place}
    for i, group in enumerate(groups):
        here |= {name: (i, j) for j, name in enumerate(group.get("param_names") or ())}
    if {*here.values()} != {*place.values()}:  # some have no name
        return saved
    prefix, more = _prefix([n for g in saved_groups for n in g["param_names"]], here)
    ordered = []
    for i, group in enumerate(saved_groups):
        at = [here.get(more + name.removeprefix(prefix)) for name in group["param_names"]]
        wanted = [(i, j) for j in range(len(groups[i]["params"]))] if i < len(groups) else []
        if sorted(at, key=repr) != sorted(wanted, key=repr):
            names = [name for name, there in zip(group["param_names"], at, strict=True) if there not in wanted]
            mine = [name for name, there in here.items() if there in wanted and there not in at]
            raise ValueError(
                f"the saved optimizer has, in group {i}, parameters {names[:5]} that this optimizer's group "
                f"lacks, which has {mine[:5]} instead: make it from the same named_parameters() in the same "
                "groups as the one that was saved"
            )
        turn = sorted(range(len(at)), key=lambda k: at[k] or ())
        ordered.append({**group, **{key: [group[key][k] for k in turn] for key in ("params", "param_names")}})
    return {**saved, "param_groups": ordered}


def _prefix(saved: Sequence[str], here: Mapping[str, Any]) -> tuple[str, str]:
    """The prefix to take from ``saved`` names, and the one to put before them, to get those of ``here``."""
    for name in here if saved and saved[0] not in here else ():
        if saved[0].endswith(f".{name}"):
            return saved[0][: -len(name)], ""
        if name.endswith(f".{saved[0]}"):
            return "", name[: -len(saved[0])]
    return "", ""


def check_kind(
    cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any], saved: Saved, parameters: Sequence[Tensor]
) -> None:
    """Raise ValueError for the state of another kind of optimizer, and for values of other shapes."""
    refuse_sums(saved)
    first: Mapping[str, Any] = next(iter(saved["param_groups"]), {})
    trial = tried(cls, {**defaults, **first})
    if trial is None:
        return
    numbers = [*chain.from_iterable(group["params"] for group in saved["param_groups"])]
    if len(numbers) != len(parameters):
        return  # load_state_dict says it
    keys: set[str] = set()
    for number, p in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or not value.ndim or key == MASTER:
                continue
            if value.shape == p.shape:
                keys.add(key)
            elif key in trial.keys:
                check_shape(value, p, f"state[{number}].{key}")
    if keys and not trial.mixes and (trial.keys - keys or not trial.keys):
        raise ValueError(
            f"the saved optimizer has {sorted(keys)} for each entry of a parameter, and {cls.__name__} needs "
            f"{sorted(trial.keys) or 'nothing'}: it was saved by another kind of optimizer"
        )


def fitted(optimizer: torch.optim.Optimizer, saved: Saved, known: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """What the ``load_state_dict`` of ``optimizer`` takes: ``saved`` in its order, and of its kind."""
    ordered = renumbered(saved, optimizer.param_groups, known or {})
    parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    check_kind(type(optimizer), optimizer.defaults, ordered, parameters)
    return dict(ordered)
