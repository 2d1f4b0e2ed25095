"""Nested values, as models take and return them and as files hold them: the tensors in them, and copies of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of no class of its own; those of a device that is written in Python say so."""
    return type(value) in (Tensor, nn.Parameter) or getattr(value, "tpcore_plain", False)


def tensors(value: Any) -> Iterator[Tensor]:
    """Those that mappings, dataclasses, lists and tuples inside of ``value`` hold, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping) or dataclasses.is_dataclass(value):
        elements = value if isinstance(value, list | tuple | Mapping) else vars(value)
        for element in elements.values() if isinstance(elements, Mapping) else elements:
            yield from tensors(element)


def mapped(function: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """``value`` with ``function(leaf)`` for each ``kind`` of leaf in its mappings, lists and tuples, which are new and
    of the same classes, outputs of transformers and named tuples included."""
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, element in value.items():  # without update, which outputs of transformers refuse
            made[key] = mapped(function, element, kind)
        return made
    if isinstance(value, list | tuple):
        make: Callable[[Any], Any] = getattr(value, "_make", type(value))
        return make([mapped(function, element, kind) for element in value])
    return function(value) if isinstance(value, kind) else value
