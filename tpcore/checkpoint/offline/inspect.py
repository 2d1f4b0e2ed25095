"""The list of tensors in a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...layout.layout import Layout
from ..forms.native import Native
from ..forms.source import Reading, Source
from ..read.source import CutRule, cuts_by, opened, tensors_of
from ..storage.dtypes import dtype_name
from ..tensors.stored import Stored

StrPath = str | os.PathLike[str]


class TensorRow(NamedTuple):
    """One tensor. ``local``: shape of a shard. ``bytes``: size of the unsharded tensor. ``padded``: whether a
    shard has padding."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: str
    local: tuple[int, ...]
    bytes: int
    padded: bool = False


class Inspected(NamedTuple):
    path: str
    form: str
    tp: int
    pp: int
    rows: list[TensorRow]


def inspect(path: StrPath, *, rules: Sequence[CutRule] = (), how: Reading | None = None) -> Inspected:
    """The tensors in a checkpoint of any form. For tpcore's own form, including other entries' tensors."""
    with opened(path, how or Reading(), rules) as source:
        rows = [_row(name, stored) for name, stored in _stored_tensors(source, rules)]
        return Inspected(source.path, source.form, source.tp, source.pp, rows)


def padded_names(path: StrPath, *, rules: Sequence[CutRule] = (), how: Reading | None = None) -> list[str]:
    """The names of tensors whose shards have padding."""
    return [row.name for row in inspect(path, rules=rules, how=how).rows if row.padded]


def _stored_tensors(source: Source, rules: Sequence[CutRule]) -> Iterator[tuple[str, Stored]]:
    if not isinstance(source, Native):
        yield from tensors_of(source, rules).items()
        return
    for pp_rank in range(source.pp):
        yield from source.stage(pp_rank, 0 if source.tp == 1 else None, cuts_by(rules)).tensors()


def _row(name: str, stored: Stored) -> TensorRow:
    dtype, local = stored.dtype, stored.first.shape
    cut = str(stored.cut.spec).partition(" ")[2] if isinstance(stored.cut, Layout) else stored.cut
    if cut is None:
        cut = "same on all ranks" if stored.bound() is None else "unknown"
    padded = False
    if isinstance(stored.cut, Layout) and stored.cut.cuts:
        padded = stored.cut.padded(stored.mesh)
        copies = sorted({share.copies for share in stored.cut.shares(stored.mesh)} - {1})
        cut += "".join(f", held by {n} ranks each" for n in copies)
    return TensorRow(name, stored.shape, dtype_name(dtype), cut, local, bytes_of_logical(stored), padded)


def bytes_of_logical(stored: Stored) -> int:
    """Bytes of the unsharded tensor."""
    return math.prod(stored.shape) * stored.dtype.itemsize
