"""Entries other than the model without recorded cuts. Only those equal on all ranks fit another degree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..format.tree import is_optimizer
from .pickles import mapped


def split(rests: Sequence[Mapping[Any, Any]]) -> tuple[dict[Any, Any], list[Any]]:
    """The entries that are the same on all ranks, and the keys of the others. ``rests``: entries per rank.

    An optimizer's state counts as different: it is cut like its parameters, even if all values are zero.
    """
    first, *others = rests
    bound = [
        key
        for key, value in first.items()
        if is_optimizer(value) or not all(key in rest and _same(value, rest[key]) for rest in others)
    ]
    return {key: value for key, value in first.items() if key not in bound}, bound


def why_bound(keys: Sequence[Any], path: str, tp: int) -> str:
    return (
        f"{', '.join(map(str, keys))} in {path} can be loaded only at the degree of the save, tp={tp}: it "
        "differs between ranks or is an optimizer's state, whose parameters the file does not name. For an "
        "optimizer's state: load(path, model_or_optimizer=optimizer, model_key=...)"
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype != b.dtype:
            return False
        return torch.equal(*(mapped(t, "a tensor beside the model", "a checkpoint").tensor for t in (a, b)))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
