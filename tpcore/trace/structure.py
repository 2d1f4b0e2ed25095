"""Splits a nested value with tensors into a list of tensors and a form, which JSON can represent.

A form is ``{"tensor": i}``, ``{"value": v}``, ``{"tuple": [...]}``, ``{"list": [...]}``,
``{"dict": [[key, form], ...]}`` or ``{"output": [[key, form], ...]}``, a dict with attribute access.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

Form = dict[str, Any]


class ModelOutput(OrderedDict[str, Any]):
    """A dict with attribute access and access by position, like the model outputs of transformers."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"this output has no {name!r}; it has {list(self)}")

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def take_apart(value: Any, where: str) -> tuple[list[Tensor], Form]:
    """The tensors of ``value`` in order, and its form. TypeError for unsupported types."""
    leaves: list[Tensor] = []
    return leaves, _form(value, where, leaves)


def _form(value: Any, where: str, leaves: list[Tensor]) -> Form:
    if isinstance(value, Tensor):
        leaves.append(value)
        return {"tensor": len(leaves) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, Mapping):
        kind = "output" if hasattr(value, "to_tuple") else "dict"
        return {kind: _entries(value, where, leaves)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"output": _entries({f.name: getattr(value, f.name) for f in fields(value)}, where, leaves)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):  # a namedtuple
        return {"output": _entries(value._asdict(), where, leaves)}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_form(v, f"{where}[{i}]", leaves) for i, v in enumerate(value)]}
    raise TypeError(
        f"{where} is a {type(value).__name__}; a traced model takes and returns tensors, numbers, strings, "
        "None, and tuples, lists and dicts of these"
    )


def _entries(value: Mapping[Any, Any], where: str, leaves: list[Tensor]) -> list[list[Any]]:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{where} has the key {key!r}: the keys of a traced model's dicts are strings")
    return [[key, _form(v, f"{where}[{key!r}]", leaves)] for key, v in value.items()]


def put_together(form: Form, leaves: Sequence[Any]) -> Any:
    """The inverse of ``take_apart``."""
    ((kind, inner),) = form.items()
    if kind == "tensor":
        return leaves[inner]
    if kind == "value":
        return inner
    if kind in ("tuple", "list"):
        made = [put_together(f, leaves) for f in inner]
        return tuple(made) if kind == "tuple" else made
    made_of = ((key, put_together(f, leaves)) for key, f in inner)
    return ModelOutput(made_of) if kind == "output" else dict(made_of)


def names_of(form: Form, where: str = "") -> list[str]:
    """A name for each tensor: ``input_ids``, ``states[0]``, ``batch['mask']``."""
    ((kind, inner),) = form.items()
    if kind == "tensor":
        return [where]
    if kind == "value":
        return []
    if kind in ("tuple", "list"):
        return [name for i, f in enumerate(inner) for name in names_of(f, f"{where}[{i}]")]
    return [name for key, f in inner for name in names_of(f, f"{where}[{key!r}]" if where else key)]


def match(form: Form, value: Any, where: str) -> list[Tensor]:
    """The tensors of ``value``. TypeError or ValueError if it does not have the given form."""
    ((kind, inner),) = form.items()
    if kind == "tensor":
        if not isinstance(value, Tensor):
            raise TypeError(f"{where} must be a tensor, not a {type(value).__name__}")
        return [value]
    if kind == "value":
        if type(value) is not type(inner) or value != inner:
            raise ValueError(f"{where}={value!r}, and the model was traced with {inner!r}: trace it with this")
        return []
    if kind in ("tuple", "list"):
        if not isinstance(value, tuple | list) or len(value) != len(inner):
            raise TypeError(f"{where} must be a {kind} of {len(inner)}, as it was traced, not {_kind(value)}")
        return [t for i, f in enumerate(inner) for t in match(f, value[i], f"{where}[{i}]")]
    if not isinstance(value, Mapping) or value.keys() != {key for key, _ in inner}:
        keys = [key for key, _ in inner]
        raise TypeError(f"{where} must be a dict with the keys {keys}, as it was traced, not {_kind(value)}")
    return [t for key, f in inner for t in match(f, value[key], f"{where}[{key!r}]")]


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"one with {list(value)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
