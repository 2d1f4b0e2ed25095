"""Encoding of a nested state as JSON. Types that JSON lacks get a tag; nothing is pickled."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..storage.dtypes import dtype_name, dtype_of
from ..storage.files import damage
from ..tensors.stored import ReadPlan

TAG = "$"
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_DEPTH = 100
Path = tuple[Any, ...]


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
        return _encode_dict(value, leaf, path)
    raise ValueError(f"cannot save {dotted(path)}: {kind.__module__}.{kind.__qualname__}{_remedy(value)}")


def _remedy(value: Any) -> str:
    if type(value).__module__ == "numpy":
        return "; pass torch.from_numpy(x) for an array, x.item() for a number"
    if hasattr(value, "state_dict"):
        return "; pass its state_dict()"
    return "; a checkpoint holds tensors, numbers, strings, None, and lists, tuples and dicts of these"


def _encode_dict(value: dict[Any, Any], leaf: Callable[[Any, Path], Any], path: Path) -> Any:
    items = []
    for key, item in value.items():
        if isinstance(key, Tensor):
            raise ValueError(f"cannot save {dotted(path)}: a tensor is a key of it")
        items.append((encode(key, leaf, (*path, key)), encode(item, leaf, (*path, key))))
    if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
        return dict(items)
    out = {TAG: type(value).__name__, "items": [list(item) for item in items]}
    # nn.Module.state_dict() keeps the versions of its modules here
    metadata = getattr(value, "_metadata", None)
    if metadata is not None:
        out["metadata"] = encode(metadata, leaf, (*path, "_metadata"))
    return out


def decode(tree: Any, leaf: Callable[[dict[str, Any], Path], Any], path: Path = ()) -> Any:
    """Decode a state. ``leaf`` returns the tensor for its JSON. CheckpointError for JSON of another form."""
    if isinstance(tree, list):
        return [decode(item, leaf, (*path, i)) for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    tag = tree.get(TAG)
    with damage(f"an entry tagged {tag!r}"):
        if tag is None:
            return {key: decode(item, leaf, (*path, key)) for key, item in tree.items()}
        if tag == "tensor":
            return leaf(tree, path)
        if tag == "tuple":
            return tuple(decode(item, leaf, (*path, i)) for i, item in enumerate(tree["items"]))
        if tag == "float":
            return float(tree["value"])
        if tag == "dtype":
            return dtype_of(tree["value"])
        if tag in _DICTS:
            out = _DICTS[tag]()
            for encoded, item in tree["items"]:
                key = decode(encoded, _no_tensor)
                out[key] = decode(item, leaf, (*path, key))
            if tree.get("metadata") is not None:
                out._metadata = decode(tree["metadata"], leaf, (*path, "_metadata"))  # type: ignore[attr-defined]
            return out
    raise CheckpointError(f"unknown tag {tag!r}: written by a newer tpcore?")


def entries(tree: Any) -> dict[Any, Any]:
    """The encoded values of an encoded dict, by decoded key."""
    if isinstance(tree, dict) and TAG not in tree:
        return tree
    if isinstance(tree, dict) and tree[TAG] in _DICTS:
        with damage(f"an entry tagged {tree[TAG]!r}"):
            return {decode(key, _no_tensor): item for key, item in tree["items"]}
    raise CheckpointError("a dict is missing where a checkpoint has one")


def only(tree: Any, kept: dict[Any, Any]) -> Any:
    """An encoded dict of the same type with only the entries of ``kept``."""
    if TAG not in tree:
        return kept
    items = zip(tree["items"], entries(tree), strict=True)
    return {**tree, "items": [[item[0], kept[key]] for item, key in items if key in kept]}


def _no_tensor(tree: dict[str, Any], path: Path) -> Any:
    raise CheckpointError("a tensor is a key of a dict")


def is_dict(tree: Any) -> bool:
    return isinstance(tree, dict) and (TAG not in tree or tree[TAG] in _DICTS)


def is_tensor(tree: Any) -> bool:
    return isinstance(tree, dict) and tree.get(TAG) == "tensor"


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Paths and encoded values of all entries that are not containers."""
    if is_dict(tree):
        for key, item in entries(tree).items():
            yield from leaves(item, (*path, key))
    elif isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from leaves(item, (*path, i))
    elif isinstance(tree, dict) and tree[TAG] == "tuple":
        with damage("a tuple"):
            yield from leaves(list(tree["items"]), path)
    else:
        yield path, tree


def is_nested(top: Mapping[Any, Any], model_key: str | None, where: str) -> bool:
    """True if ``top[model_key]`` is the model's state, encoded or not; False if ``top`` itself is one."""
    state = None if model_key is None else top.get(model_key)
    if isinstance(state, Mapping) and (is_dict(state) or TAG not in state):
        return True
    if any(isinstance(value, Tensor) or is_tensor(value) for value in top.values()):
        return False
    raise CheckpointError(
        f"{where} has no model under {model_key!r}, nor is it one's state itself: it has {list(top)[:20]}"
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
