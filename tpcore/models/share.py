"""How much of a model is sharded, and which modules stay whole, in one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

from ..layers.sharding import sharding
from .plan import wildcard

_SMALLEST = 0.01
"""The part of all parameters below which a whole module is not named."""


def summary(model: nn.Module) -> str:
    split = sum(map(_sharded, model.parameters()))
    sizes = {id(p): p.numel() for p in model.parameters() if not _sharded(p)}
    every = max(split + sum(sizes.values()), 1)
    names: Counter[str] = Counter()
    for name, module in _whole(model, ""):
        names[name] += sum(sizes.pop(id(p), 0) for p in module.parameters())
    large = [f"{name}.*" for name, size in names.most_common() if size >= _SMALLEST * every]
    named = f"; whole: {', '.join(large)}" if large else ""
    return f"{type(model).__name__}: sharded {split / every:.0%} of the parameters{named}"


def _sharded(p: Tensor) -> int:
    """The number of entries of a whole parameter that is sharded; 0 for any other."""
    found = sharding(p)
    return 0 if found is None or not found.layout.cuts else math.prod(found.layout.shape)


def _whole(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules without a sharded parameter."""
    if not any(map(_sharded, module.parameters())):
        yield wildcard(name), module
        return
    for child, inner in module.named_children():
        yield from _whole(inner, f"{name}.{child}".lstrip("."))
