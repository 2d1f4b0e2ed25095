"""An optimizer's encoded state out of those that the stages of a pipeline have, by parameter names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..format.tree import TAG, entries, is_dict, is_tensor

STAGE = "stage"
"""The key by which an encoded tensor says in which stage's files it lies."""


def is_encoded_optimizer(item: Any) -> bool:
    return is_dict(item) and {"state", "param_groups"} <= entries(item).keys()


def merged(stages: Sequence[Any], names: Sequence[str] | None) -> Any | None:
    """One optimizer's state that has the parameters of all stages, or None where a stage has no names.

    ``names``: those that are wanted, in the order in which the job's optimizer has them; None: all, stage
    after stage. Options of groups are those of the first stage.
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
    return all(
        is_dict(g) and len(entries(g).get("param_names") or ()) == len(entries(g)["params"]) for g in groups
    )


def _members(every: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Stage and number by name; what several stages have comes from the first of them."""
    found: dict[str, tuple[int, int]] = {}
    for stage, group in enumerate(every):
        known = entries(group)
        for name, index in zip(known["param_names"], known["params"], strict=True):
            found.setdefault(name, (stage, index))
    return found


def _marked(tree: Any, stage: int) -> Any:
    """With the stage in each encoded tensor."""
    if is_tensor(tree):
        return {**tree, STAGE: stage}
    if isinstance(tree, list):
        return [_marked(item, stage) for item in tree]
    return {key: _marked(item, stage) for key, item in tree.items()} if isinstance(tree, dict) else tree
