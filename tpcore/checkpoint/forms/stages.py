"""Merges an optimizer's encoded states from all pipeline stages, by parameter names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..format.tree import TAG, entries, is_dict, is_tensor

STAGE = "stage"
"""Key in an encoded tensor: the stage whose files hold it."""


def is_encoded_optimizer(item: Any) -> bool:
    return is_dict(item) and {"state", "param_groups"} <= entries(item).keys()


def merged(stages: Sequence[Any], names: Sequence[str] | None) -> Any | None:
    """One optimizer state with the parameters of all stages, or None if a stage has no parameter names.

    ``names``: the wanted parameters, in the order of the job's optimizer; None: all, stage after stage. The
    groups' options are those of the first stage.
    """
    groups = [entries(item)["param_groups"] for item in stages]
    if len({len(g) for g in groups}) > 1 or any(not _named(g) for g in groups):
        return None
    states, made, number = [], [], 0
    for every in zip(*groups, strict=True):
        found = _members(every)
        mine = [name for name in (found if names is None else names) if name in found]
        for at, name in enumerate(mine, number):
            stage, index = found[name]
            values = entries(entries(stages[stage])["state"]).get(index)
            if values is not None:
                states.append([at, _marked(values, stage)])
        numbers = list(range(number, number + len(mine)))
        made.append({**entries(every[0]), "params": numbers, "param_names": mine})
        number += len(mine)
    return {**entries(stages[0]), "state": {TAG: "dict", "items": states}, "param_groups": made}


def _named(groups: Sequence[Any]) -> bool:
    return all(is_dict(g) and len(entries(g).get("param_names") or ()) == len(entries(g)["params"]) for g in groups)


def _members(every: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Stage and index by parameter name. The first stage wins for a parameter of several stages."""
    found: dict[str, tuple[int, int]] = {}
    for stage, group in enumerate(every):
        known = entries(group)
        for name, index in zip(known["param_names"], known["params"], strict=True):
            found.setdefault(name, (stage, index))
    return found


def _marked(tree: Any, stage: int) -> Any:
    """``tree`` with the stage added to each encoded tensor."""
    if is_tensor(tree):
        return {**tree, STAGE: stage}
    if isinstance(tree, list):
        return [_marked(item, stage) for item in tree]
    return {key: _marked(item, stage) for key, item in tree.items()} if isinstance(tree, dict) else tree
