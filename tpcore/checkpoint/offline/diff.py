"""Comparison of the models in two checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from ..forms.registry import open_source
from ..forms.source import Reading
from ..read.source import CutRule, part, tensors_of
from ..storage.dtypes import dtype_name
from ..storage.files import CHUNK
from ..storage.progress import Progress
from ..tensors.stored import Stored
from .consolidate import StrPath
from .inspect import bytes_of_logical


class Difference(NamedTuple):
    """``why``: a missing tensor or another shape or dtype. ``absolute``, ``relative``: largest differences
    of the values."""

    name: str
    why: str | None
    absolute: float
    relative: float


def diff(
    a: StrPath,
    b: StrPath,
    *,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    progress: Progress | None = None,
) -> Iterator[Difference]:
    """Compare the models in two checkpoints of any form and degree. Yields one entry per differing tensor."""
    how = how or Reading()
    with ExitStack() as stack:
        one, other = (open_source(os.fspath(path), how, stack) for path in (a, b))
        mine, theirs = (tensors_of(s, rules) for s in (one, other))
        if progress is not None:
            progress.start(sum(map(bytes_of_logical, mine.values())))
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in mine or name not in theirs:
                where = one.path if name in mine else other.path
                yield Difference(name, f"only in {where}", 0.0, 0.0)
            elif mine[name].shape != theirs[name].shape:
                yield Difference(name, f"shape {mine[name].shape} and {theirs[name].shape}", 0.0, 0.0)
            else:
                yield from _values(name, mine[name], theirs[name])
            if progress is not None and name in mine:
                progress.add(bytes_of_logical(mine[name]))


def _values(name: str, a: Stored, b: Stored) -> Iterator[Difference]:
    why = None if a.dtype == b.dtype else f"dtype {dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
    x, y = part(a, 0, 1).flatten(), part(b, 0, 1).flatten()
    absolute = relative = 0.0
    for i in range(0, x.numel(), CHUNK):
        absolute, relative = _furthest(x[i : i + CHUNK], y[i : i + CHUNK], absolute, relative)
    if why is not None or absolute > 0 or math.isnan(absolute):
        yield Difference(name, why, absolute, relative)


def _furthest(x: torch.Tensor, y: torch.Tensor, absolute: float, relative: float) -> tuple[float, float]:
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    gap = (x - y).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    size = torch.maximum(x.abs(), y.abs()).nan_to_num(nan=1.0, posinf=math.inf)
    ratio = (gap / size).masked_fill(same, 0.0).nan_to_num(nan=math.inf)
    return max(absolute, float(gap.max())), max(relative, float(ratio.max()))
