"""Three tiers: `make test` leaves out what is marked ``slow``, `make test-all` what is marked ``drill``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

SLOW, DRILL = pytest.mark.slow, pytest.mark.drill


def tiers(quick: Iterable[Any], slow: Iterable[Any] = (), drill: Iterable[Any] = ()) -> list[Any]:
    """Parameters of a test, each once: ``quick``, then with their marks what only the others have."""
    params: list[Any] = []
    seen: list[Any] = []
    for values, mark in ((quick, None), (slow, SLOW), (drill, DRILL)):
        for value in values:
            if value not in seen:
                seen.append(value)
                several = isinstance(value, tuple) and not hasattr(value, "_fields")
                params.append(pytest.param(*(value if several else (value,)), marks=(mark,) if mark else ()))
    return params


def diagonal(params: Mapping[str, Any], **axes: Sequence[Any]) -> bool:
    """True for as many points of a product as its longest axis has values. Each value of an axis occurs."""
    axes = {name: values for name, values in axes.items() if name in params}
    points = range(max(map(len, axes.values()), default=0))
    return any(all(params[name] == values[i % len(values)] for name, values in axes.items()) for i in points)
