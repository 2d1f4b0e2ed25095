"""The calls that a traced model accepts: its arguments, their dtypes, and the shapes that have a program.

A nested value with tensors is a list of tensors and a form, which JSON can represent: ``{"tensor": i}``,
``{"value": v}``, ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [[key, form], ...]}``, or ``{"output": [[key,
form], ...]}`` for a dict with attribute access."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from inspect import Parameter, Signature
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..backend.interface import DynamicDim
from ..checkpoint.storage.tensorfile import dtype_name, dtype_of

Structure = dict[str, Any]
DynamicShape = tuple[int | str, ...]
"""Sizes of fixed dims and names of dynamic dims."""
_OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


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


_KINDS: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "list": list, "dict": dict, "output": ModelOutput}


def take_apart(value: Any, where: str) -> tuple[list[Tensor], Structure]:
    """The tensors of ``value`` in order, and its form. TypeError for unsupported types."""
    leaves: list[Tensor] = []
    return leaves, _form(value, where, leaves)


def _form(value: Any, where: str, leaves: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        leaves.append(value)
        return {"tensor": len(leaves) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if is_dataclass(value) and not isinstance(value, type | Mapping):
        return {"output": _entries({f.name: getattr(value, f.name) for f in fields(value)}, where, leaves)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):  # a namedtuple
        return {"output": _entries(value._asdict(), where, leaves)}
    if isinstance(value, Mapping):
        return {"output" if hasattr(value, "to_tuple") else "dict": _entries(value, where, leaves)}
    if isinstance(value, tuple | list):
        every = [_form(v, f"{where}[{i}]", leaves) for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": every}
    raise TypeError(
        f"{where} is a {type(value).__name__}; a traced model takes and returns tensors, numbers, strings, "
        "None, and tuples, lists and dicts of these"
    )


def _entries(value: Mapping[Any, Any], where: str, leaves: list[Tensor]) -> list[list[Any]]:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{where} has the key {key!r}: the keys of a traced model's dicts are strings")
    return [[key, _form(v, f"{where}[{key!r}]", leaves)] for key, v in value.items()]


def put_together(form: Structure, leaves: Sequence[Any]) -> Any:
    """The inverse of ``take_apart``."""
    ((kind, inner),) = form.items()
    if kind == "tensor":
        return leaves[inner]
    if kind == "value":
        return inner
    if kind in ("tuple", "list"):
        return _KINDS[kind](put_together(f, leaves) for f in inner)
    return _KINDS[kind]((key, put_together(f, leaves)) for key, f in inner)


def names_of(form: Structure, where: str = "") -> list[str]:
    """A name for each tensor: ``input_ids``, ``states[0]``, ``batch['mask']``."""
    ((kind, inner),) = form.items()
    if kind == "tensor":
        return [where]
    if kind == "value":
        return []
    parts = enumerate(inner) if kind in ("tuple", "list") else inner
    return [name for key, f in parts for name in names_of(f, f"{where}[{key!r}]" if where else str(key))]


def match(form: Structure, value: Any, where: str) -> list[Tensor]:
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


@dataclass(frozen=True)
class Arguments:
    """The parameters of the traced ``forward``, and the form of the dict of given arguments. ``parameters``: name,
    kind, and default as ``[value]``, or None if JSON cannot represent the default."""

    parameters: tuple[tuple[str, int, list[Any] | None], ...]
    form: Structure

    @classmethod
    def of(
        cls, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Arguments, list[Tensor]]:
        """The arguments of ``forward(*args, **kwargs)``, and their tensors. TypeError if they do not fit."""
        signature = inspect.signature(forward)
        leaves, form = take_apart(dict(signature.bind(*args, **kwargs).arguments), "inputs")
        plain = type(None), bool, int, float, str
        parameters = tuple(
            (p.name, int(p.kind), [p.default] if isinstance(p.default, plain) else None)
            for p in signature.parameters.values()
        )
        return cls(parameters, form), leaves

    @cached_property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return names_of(self.form)

    @cached_property
    def _signature(self) -> Signature:
        kinds = {int(kind): kind for kind in (*_OPEN, *_NAMED)}
        # all parameters are optional here, so that bind() below names the missing one
        parameters = [Parameter(name, kinds[kind]) for name, kind, _ in self.parameters]
        return Signature([p if p.kind in _OPEN else p.replace(default=None) for p in parameters])

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call. TypeError or ValueError if the call does not have the traced form."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        leaves: list[Tensor] = []
        for name, form in self.form["dict"]:
            if name in arguments:
                leaves += match(form, arguments[name], name)
            elif "value" not in form:
                raise TypeError(f"missing argument {name!r}; the model was traced with {self.names}")
        untraced = arguments.keys() - dict(self.form["dict"]).keys()
        for name, _, default in self.parameters if untraced else ():
            if name in untraced and [arguments[name]] != (default or [None]):
                raise TypeError(
                    f"argument {name!r} was not given when the model was traced, with {self.names}; "
                    "trace it with this one as well"
                )
        return leaves

    def to_json(self) -> dict[str, Any]:
        return {"parameters": [list(p) for p in self.parameters], "form": self.form}

    @classmethod
    def from_json(cls, data: Any) -> Arguments:
        return cls(tuple((str(n), int(k), d) for n, k, d in data["parameters"]), data["form"])


def ranges(leaves: Sequence[Tensor], names: Sequence[str]) -> str:
    """The smallest and largest value of each tensor of ids, for the error of an index that no table has."""
    ids = [
        f"{name} has {int(t.min())} to {int(t.max())}"
        for name, t in zip(names, leaves, strict=True)
        if t.numel() and t.dtype in (torch.int64, torch.int32)
    ]
    return f"{', '.join(ids) or 'no input has ids'}; an embedding of n rows takes 0 to n - 1"


@dataclass(frozen=True)
class Inputs:
    """``shapes``: one per tensor of ``arguments``, of sizes and names of ``dims``. ``buckets``: for each
    program the sizes of its dims, smallest first; empty if there is one program for all sizes."""

    arguments: Arguments
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[DynamicShape, ...]
    dims: Mapping[str, DynamicDim]
    buckets: tuple[Mapping[str, int], ...] = ()

    def sizes(self, leaves: Sequence[Tensor]) -> dict[str, int]:
        """The size of each named dim in a call. TypeError or ValueError if no program accepts the tensors."""
        for name, t, dtype in zip(self.arguments.names, leaves, self.dtypes, strict=True):
            if t.is_nested:
                raise TypeError(f"{name} is a nested tensor: pad it to one size, with a mask")
            if t.dtype != dtype:
                raise TypeError(f"{name} is of {t.dtype}, and the model was traced with {dtype}: convert it")
            if t.is_meta:
                raise TypeError(f"{name} is on meta, without values")
            if t.layout != torch.strided:
                raise TypeError(f"{name} is {t.layout}, and to_dense() is taken")
        sizes: dict[str, int] = {}
        for t, shape in zip(leaves, self.shapes, strict=True):
            if t.ndim != len(shape) or not all(map(partial(self._fits, sizes), t.shape, shape)):
                self._refuse(leaves)
        return sizes

    def _fits(self, sizes: dict[str, int], n: int, m: int | str) -> bool:
        if isinstance(m, int):
            return n == m
        return self.dims[m].takes(n) and sizes.setdefault(m, n) == n

    def program(self, sizes: Mapping[str, int], leaves: Sequence[Tensor]) -> int:
        """The number of the smallest program with room for these sizes."""
        for number, bucket in enumerate(self.buckets):
            if all(sizes[name] <= bucket[name] for name in bucket):
                return number
        return self._refuse(leaves) if self.buckets else 0

    def padded(self, t: Tensor, i: int, number: int, value: float) -> Tensor:
        """Input ``i``, padded at the end of each dim to the sizes of program ``number``."""
        bucket = self.buckets[number]
        want = [m if isinstance(m, int) else bucket[m] for m in self.shapes[i]]
        if list(t.shape) == want:
            return t
        out = torch.full(want, value, dtype=t.dtype)
        out[tuple(slice(n) for n in t.shape)] = t
        return out

    def _refuse(self, leaves: Sequence[Tensor]) -> NoReturn:
        named = zip(self.arguments.names, leaves, strict=True)
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in named)
        why = f"no program takes {shapes}; the model was traced for {self}"
        fixed = []
        for name, t, shape in zip(self.arguments.names, leaves, self.shapes, strict=True):
            if t.ndim == len(shape) and any(isinstance(m, int) and n != m for n, m in zip(t.shape, shape, strict=True)):
                fixed.append(name)
        if self.buckets and fixed:
            why += (
                f". A dim is padded where the examples of the buckets differ in it: for {', '.join(fixed)} "
                "trace with examples of each size, or fill the call up yourself"
            )
        raise ValueError(why)

    def __str__(self) -> str:
        named = zip(self.arguments.names, self.shapes, strict=True)
        text = ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in named)
        if self.buckets:
            sizes = (", ".join(f"{name} {n}" for name, n in bucket.items()) for bucket in self.buckets)
            return f"{text}, with sizes up to those of one of: {'; '.join(sizes)}"
        return text + (f", where {', '.join(map(str, self.dims.values()))}" if self.dims else "")

    def to_json(self) -> dict[str, Any]:
        return {
            **self.arguments.to_json(),
            "dtypes": [dtype_name(d) for d in self.dtypes],
            "shapes": [list(s) for s in self.shapes],
            "dims": {d.name: [d.min, d.max] for d in self.dims.values()},
            "buckets": [dict(b) for b in self.buckets],
        }

    @classmethod
    def from_json(cls, data: Any) -> Inputs:
        return cls(
            Arguments.from_json(data),
            tuple(dtype_of(d) for d in data["dtypes"]),
            tuple(tuple(s) for s in data["shapes"]),
            {name: DynamicDim(name, low, high) for name, (low, high) in data["dims"].items()},
            tuple(data["buckets"]),
        )
