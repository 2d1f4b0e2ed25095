"""Collectives as torch operators, one for each primitive, so that a graph can contain them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout.mesh import Group
from .transport import TABLE, Primitive
from .wrapper import Relay

Find = Callable[[str], Any]
"""The current Comm of a name."""


def define(namespace: str, find: Find) -> torch.library.Library:
    """Define the operators ``namespace::all_reduce`` and so on. Their last argument is a name, and the Comm
    that ``find`` returns for it runs the collective. They exist as long as the returned library does."""
    library = torch.library.Library(namespace, "DEF")
    for primitive in TABLE:
        library.define(primitive.name + _schema(primitive))
        name = f"{namespace}::{primitive.name}"
        torch.library.impl(name, "CompositeExplicitAutograd", lib=library)(_run(primitive, find))
        torch.library.register_fake(name, _shape(primitive), lib=library)
    return library


def _schema(primitive: Primitive) -> str:
    """The operator's schema: the primitive's arguments, the group's size if the result's shape depends on
    it, and the group's name."""
    size = {} if primitive.shape is None else {"size": "int"}
    parameters = {"x": "Tensor", **primitive.arguments, **size, "axes": "str"}
    return f"({', '.join(f'{kind} {name}' for name, kind in parameters.items())}) -> Tensor"


def _run(primitive: Primitive, find: Find) -> Callable[..., Tensor]:
    def run(x: Tensor, *given: Any) -> Tensor:
        named = dict(zip(primitive.arguments, given, strict=False))
        if "donate" in named:  # an operator must not return its argument's memory
            named["donate"] = False
        made: Tensor = getattr(find(given[-1]), primitive.name)(x, **named)
        return made

    return run


def _shape(primitive: Primitive) -> Callable[..., Tensor]:
    count = len(primitive.arguments)

    def shape(x: Tensor, *given: Any) -> Tensor:
        return primitive.result(x, 0 if primitive.shape is None else given[count], *given[:count])

    return shape


class Place(NamedTuple):
    """What a graph needs to know about a group."""

    group: Group
    size: int
    position: Tensor


class Operators(Relay):
    """Puts operators in place of collectives into the graph that is being traced."""

    def __init__(self, namespace: str, name: str, place: Place) -> None:
        self.group, self.size, self.position = place
        self._operators, self._name = getattr(torch.ops, namespace), name

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        size = () if primitive.shape is None else (self.size,)
        made: Tensor = getattr(self._operators, primitive.name)(x, *arguments, *size, self._name)
        return made
