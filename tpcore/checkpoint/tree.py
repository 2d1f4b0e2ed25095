"""Encoding of a nested state as JSON. Types that JSON lacks get a tag; nothing is pickled."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError
from .storage.files import MALFORMED
from .storage.tensorfile import dtype_name, dtype_of
from .stored import ReadPlan

TAG = "$"
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_DEPTH = 100
Path = tuple[Any, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Leaf:
    """A tensor of a state: the file in its rank's directory, and the name in the file."""

    file: str
    name: str


def dotted(path: Path) -> str:
    """``("optimizer", "state", 0)`` as ``optimizer.state[0]``."""
    text = ""
    for key in path:
        text += (f".{key}" if text else key) if isinstance(key, str) else f"[{key!r}]"
    return text or "the state"


def encode(value: Any, leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Encode a state. ``leaf`` returns the JSON of a tensor or ReadPlan. ValueError, naming it, for other types."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
    if isinstance(value, (Tensor, ReadPlan)):
        return leaf(value, path)
    if kind is torch.dtype:
        return {TAG: "dtype", "value": dtype_name(value)}
    if len(path) > _DEPTH:
        raise ValueError(f"{dotted(path[:8])}... is nested more than {_DEPTH} deep: does it contain itself?")
    if kind in (list, tuple):
        items = [encode(item, leaf, (*path, i)) for i, item in enumerate(value)]
        return items if kind is list else {TAG: "tuple", "items": items}
    if kind in _DICTS.values():
        items = []
        for key, item in value.items():
            if isinstance(key, Tensor):
                raise ValueError(f"cannot save {dotted(path)}: a tensor is a key of it")
            at = (*path, key)
            items.append((key if type(key) is str else encode(key, leaf, at), encode(item, leaf, at)))
        return _tagged(value, items, leaf, path)
    raise ValueError(f"cannot save {dotted(path)}: {kind.__module__}.{kind.__qualname__}{_remedy(value)}")


def _remedy(value: Any) -> str:
    if type(value).__module__ == "numpy":
        return "; pass torch.from_numpy(x) for an array, x.item() for a number"
    if hasattr(value, "state_dict"):
        return "; pass its state_dict()"
    return "; a checkpoint holds tensors, numbers, strings, None, and lists, tuples and dicts of these"


def _tagged(value: dict[Any, Any], items: list[Any], leaf: Callable[[Any, Path], Any], path: Path) -> Any:
    if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
        return dict(items)
    out = {TAG: type(value).__name__, "items": [list(item) for item in items]}
    # nn.Module.state_dict() keeps the versions of its modules here
    metadata = getattr(value, "_metadata", None)
    if metadata is not None:
        out["metadata"] = encode(metadata, leaf, (*path, "_metadata"))
    return out


def decode(tree: Any, path: Path = ()) -> Any:
    """Decode a state, with a Leaf for each tensor. CheckpointError for JSON of another form."""
    if not isinstance(tree, list | dict):
        return tree
    if len(path) > _DEPTH + 1:  # a number or tensor in the deepest container may be a dict with a tag
        raise CheckpointError(f"{dotted(path[:8])}... is nested more than {_DEPTH} deep")
    if isinstance(tree, list):
        return [decode(item, (*path, i)) for i, item in enumerate(tree)]
    tag = tree.get(TAG)
    try:
        if tag is None or tag in _DICTS:
            out = _DICTS[tag or "dict"]()
            for encoded, item in tree["items"] if tag else tree.items():
                key = decode(encoded, (*path, "a key")) if isinstance(encoded, dict | list) else encoded
                if isinstance(key, Leaf):
                    raise CheckpointError("a tensor is a key of a dict")
                out[key] = decode(item, (*path, key)) if isinstance(item, dict | list) else item
            if tag and tree.get("metadata") is not None:
                out._metadata = decode(tree["metadata"], (*path, "_metadata"))  # type: ignore[attr-defined]
            return out
        if tag == "tensor":
            return Leaf(str(tree["file"]), str(tree["name"]))
        if tag == "tuple":
            return tuple(decode(item, (*path, i)) for i, item in enumerate(tree["items"]))
        if tag == "float":
            return float(tree["value"])
        if tag == "dtype":
            return dtype_of(tree["value"])
    except MALFORMED as e:
        raise CheckpointError(f"an entry tagged {tag!r} is damaged: {type(e).__name__}: {e}") from e
    raise CheckpointError(f"unknown tag {tag!r}: written by a newer tpcore?")


def filled(value: Any, kind: type[T], fill: Callable[[T, Path], Any], path: Path = ()) -> Any:
    """``value`` with ``fill(item, path)`` in place of each item of a ``kind`` in it."""
    if isinstance(value, kind):
        return fill(value, path)
    if isinstance(value, list | tuple):
        return type(value)(filled(item, kind, fill, (*path, i)) for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    out = type(value)()
    for key, item in value.items():
        at = (*path, key)
        out[key] = fill(item, at) if isinstance(item, kind) else filled(item, kind, fill, at)
    if hasattr(value, "_metadata"):
        out._metadata = value._metadata  # type: ignore[attr-defined]
    return out


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Paths and values of all entries that are no containers, or empty ones."""
    if not isinstance(value, dict | list | tuple) or not value:
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, (*path, key))


def is_nested(top: Mapping[Any, Any], model_key: str | None, where: str) -> bool:
    """True if ``top[model_key]`` is the model's state; False if ``top`` itself is one."""
    if model_key is not None and isinstance(top.get(model_key), Mapping):
        return True
    if any(isinstance(value, Tensor | Leaf) for value in top.values()):
        return False
    raise CheckpointError(
        f"{where} has no model under {model_key!r}, nor is it one's state itself: give a model_key of {list(top)[:20]}"
    )


def is_optimizer(value: Any) -> bool:
    """Whether ``value`` has the form of an optimizer's ``state_dict()``."""
    has_state = isinstance(value, Mapping) and isinstance(value.get("state"), Mapping)
    return has_state and isinstance(value.get("param_groups"), list)


def model_tensors(state: Any) -> Iterator[tuple[Any, Tensor]]:
    """Name and value of each tensor in the models' state_dicts of a state to save, and at its top level."""
    for model in (state, *state.values()) if isinstance(state, Mapping) else ():
        if isinstance(model, Mapping) and not is_optimizer(model):
            yield from ((name, t) for name, t in model.items() if isinstance(t, Tensor))


def parameter_names(groups: list[Any]) -> Iterator[tuple[int, str]]:
    """Index and name of the parameters in an optimizer's ``param_groups``; none if it has no names."""
    for group in groups:
        for index, name in zip(group["params"], group.get("param_names") or (), strict=False):
            if not isinstance(index, int) or not isinstance(name, str):
                raise CheckpointError(f"an optimizer's param_groups name parameter {index!r} {name!r}")
            yield index, name


def merged(stages: Sequence[dict[str, Any]], names: Sequence[str] | None) -> dict[str, Any] | None:
    """One optimizer's state of the stages', for the parameters ``names`` in order; None if a stage has no names."""
    groups = [optimizer["param_groups"] for optimizer in stages]
    if len({len(g) for g in groups}) > 1 or not all(_named(group) for g in groups for group in g):
        return None
    state: dict[int, Any] = {}
    merged_groups: list[dict[str, Any]] = []
    number = 0
    for group_of_stages in zip(*groups, strict=True):
        members: dict[str, tuple[int, int]] = {}  # the first stage wins for a parameter of several stages
        for stage, group in enumerate(group_of_stages):
            for name, index in zip(group["param_names"], group["params"], strict=True):
                members.setdefault(name, (stage, index))
        wanted = [name for name in (members if names is None else names) if name in members]
        for at, name in enumerate(wanted, number):
            stage, index = members[name]
            if index in stages[stage]["state"]:
                state[at] = stages[stage]["state"][index]
        numbers = list(range(number, number + len(wanted)))
        merged_groups.append({**group_of_stages[0], "params": numbers, "param_names": wanted})
        number += len(wanted)
    return {**stages[0], "state": state, "param_groups": merged_groups}


def _named(group: Any) -> bool:
    return isinstance(group, dict) and len(group.get("param_names") or ()) == len(group["params"])
