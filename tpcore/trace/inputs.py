"""The calls that a traced model accepts: its arguments, their dtypes, and the shapes that have a program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, Signature
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..backend.interface import DynamicDim
from ..checkpoint.storage.tensorfile import dtype_name, dtype_of
from .structure import Form, match, names_of, take_apart

Shape = tuple[int | str, ...]
"""Sizes of fixed dims and names of dynamic dims."""
_OPEN = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_KINDS = (*_OPEN, Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Arguments:
    """The parameters of the traced ``forward``, and the form of the dict of given arguments.

    ``parameters``: name, kind, and default as ``[value]``, or None if JSON cannot represent the default.
    """

    parameters: tuple[tuple[str, int, list[Any] | None], ...]
    form: Form

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
        kinds = {int(kind): kind for kind in _KINDS}
        # all parameters are optional here, so that bind() below names the missing one
        made = [Parameter(name, kinds[kind]) for name, kind, _ in self.parameters]
        return Signature([p if p.kind in _OPEN else p.replace(default=None) for p in made])

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call. TypeError or ValueError if the call does not have the traced form."""
        given = self._signature.bind(*args, **kwargs).arguments
        leaves: list[Tensor] = []
        for name, form in self.form["dict"]:
            if name in given:
                leaves += match(form, given[name], name)
            elif "value" not in form:
                raise TypeError(f"missing argument {name!r}; the model was traced with {self.names}")
        if len(given) > len(self.form["dict"]) or given.keys() - dict(self.form["dict"]).keys():
            self._refuse_untraced(given)
        return leaves

    def _refuse_untraced(self, given: Mapping[str, Any]) -> None:
        traced = dict(self.form["dict"])
        for name, _, default in self.parameters:
            if name in given and name not in traced and [given[name]] != (default or [None]):
                raise TypeError(
                    f"argument {name!r} was not given when the model was traced, with {self.names}; "
                    "trace it with this one as well"
                )

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
    shapes: tuple[Shape, ...]
    dims: Mapping[str, DynamicDim]
    buckets: tuple[Mapping[str, int], ...] = ()

    def sizes(self, leaves: Sequence[Tensor]) -> dict[str, int]:
        """The size of each named dim in a call. TypeError or ValueError if no program accepts the tensors."""
        for name, t, dtype in zip(self.arguments.names, leaves, self.dtypes, strict=True):
            if t.is_nested:
                raise TypeError(f"{name} is a nested tensor: pad it to one size, with a mask")
            if t.dtype != dtype:
                raise TypeError(f"{name} is of {t.dtype}, and the model was traced with {dtype}: convert it")
            if t.is_meta or t.layout != torch.strided:
                what = "on meta, without values" if t.is_meta else f"{t.layout}, and to_dense() is taken"
                raise TypeError(f"{name} is {what}")
        sizes: dict[str, int] = {}
        for t, shape in zip(leaves, self.shapes, strict=True):
            if len(t.shape) != len(shape) or not all(
                n == m if isinstance(m, int) else self._fits_dim(m, n, sizes)
                for n, m in zip(t.shape, shape, strict=True)
            ):
                self._refuse(leaves)
        return sizes

    def _fits_dim(self, name: str, n: int, sizes: dict[str, int]) -> bool:
        dim = self.dims[name]
        return n >= dim.min and (dim.max is None or n <= dim.max) and sizes.setdefault(name, n) == n

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
        given = ", ".join(f"{name} {list(t.shape)}" for name, t in named)
        why = f"no program takes {given}; the model was traced for {self}"
        fixed = [
            n for n, t, s in zip(self.arguments.names, leaves, self.shapes, strict=True) if _fixed_size_differs(t, s)
        ]
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


def _fixed_size_differs(t: Tensor, shape: Shape) -> bool:
    """Whether ``t`` has another size in a fixed dim of ``shape``."""
    return t.ndim == len(shape) and any(isinstance(m, int) and n != m for n, m in zip(t.shape, shape, strict=True))
