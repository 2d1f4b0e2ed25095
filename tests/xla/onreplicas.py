"""Calls with a context on replicas, as ``tpcore.testing.run_ranks`` makes them on threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tpcore
from tpcore_neuron.testing import run_replicas


def on_replicas(
    world: int, tp: int, fn: Callable[..., Any], *args: Any, pp: int = 1, ep: int = 1, cp: int = 1, **options: Any
) -> list[Any]:
    """``fn(ctx, *args)`` on every rank of pp x dp x ep x cp x tp replicas."""
    return run_replicas(_with_context, world, {"tp": tp, "pp": pp, "ep": ep, "cp": cp}, fn, args, **options)


def _with_context(axes: dict[str, int], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    ctx = tpcore.init(backend="neuron", **axes)
    try:
        return fn(ctx, *args)
    finally:
        tpcore.shutdown()
