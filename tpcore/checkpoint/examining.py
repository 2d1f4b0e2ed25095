"""What is in a checkpoint, whether it is whole, and how two of them differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..shard import ShardSpec
from .dtypes import dtype_name
from .files import CHUNK, crc32_of, naming
from .manifest import MANIFEST
from .progress import Steps, Tell, nothing
from .reader import Checkpoint, View
from .source import CutRule, Source, opened, part
from .stored import Stored
from .tree import is_tensor, leaves, spell
from .unsharded import Reading, unsound

StrPath = str | os.PathLike[str]


class Row(NamedTuple):
    """One tensor. ``local``: the shape of a shard; ``bytes``: of the logical tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: str
    local: tuple[int, ...]
    bytes: int


class Inspected(NamedTuple):
    path: str
    form: str
    tp: int
    pp: int
    rows: list[Row]


class Difference(NamedTuple):
    """``why``: what is different in kind; else by how much the values differ at most."""

    name: str
    why: str | None
    absolute: float
    relative: float


def inspect(path: StrPath, *, rules: Sequence[CutRule] = (), how: Reading | None = None) -> Inspected:
    """Every tensor in a checkpoint of any form; of this library's, with what lies beside the model."""
    with opened(path, how or Reading(), rules) as source:
        rows = [_row(name, stored) for name, stored in _all(source)]
        return Inspected(source.path, source.form, source.tp, source.pp, rows)


def _all(source: Source) -> Iterator[tuple[str, Stored]]:
    if source.checkpoint is None:
        yield from source.tensors()
        return
    for pp_rank in range(source.pp):
        view = View(source.checkpoint, 0, 1, pp_rank)
        for path, leaf in leaves(view.tree):
            if is_tensor(leaf):
                yield spell(path), view.stored(leaf, spell(path))


def _row(name: str, stored: Stored) -> Row:
    dtype, local = stored.dtype, stored.first.shape
    cut = str(stored.cut).partition(" ")[2] if isinstance(stored.cut, ShardSpec) else stored.cut
    if cut is None:
        cut = "same on all ranks" if stored.bound() is None else "unknown"
    return Row(name, stored.shape, dtype_name(dtype), cut, local, _bytes(stored))


def _bytes(stored: Stored) -> int:
    """Of the logical tensor."""
    return math.prod(stored.shape) * stored.dtype.itemsize


def diff(
    a: StrPath,
    b: StrPath,
    *,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    tell: Tell = nothing,
) -> Iterator[Difference]:
    """How the models in two checkpoints of any form and degree differ: an entry for each tensor that does."""
    how = how or Reading()
    with _opened(a, how, rules) as one, _opened(b, how, rules) as other:
        mine, theirs = dict(one.tensors()), dict(other.tensors())
        tick = Steps(sum(map(_bytes, mine.values())), tell)
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in mine or name not in theirs:
                where = one.path if name in mine else other.path
                yield Difference(name, f"only in {where}", 0.0, 0.0)
            elif mine[name].shape != theirs[name].shape:
                yield Difference(name, f"shape {mine[name].shape} and {theirs[name].shape}", 0.0, 0.0)
            else:
                yield from _values(name, mine[name], theirs[name])
            tick(_bytes(mine[name]) if name in mine else 0)


def _opened(path: StrPath, how: Reading, rules: Sequence[CutRule]) -> AbstractContextManager[Source]:
    ours = os.path.isfile(os.path.join(path, MANIFEST))
    return opened(path, how, () if ours else rules)


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


def verify(
    path: StrPath,
    *,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    tell: Tell = nothing,
) -> list[str]:
    """Everything that is wrong with a checkpoint: missing, surplus and damaged files and tensors."""
    try:
        with opened(path, how or Reading(), rules) as source:
            if source.checkpoint is not None:
                return list(dict.fromkeys(_problems(source.checkpoint, tell)))
            for _, stored in source.tensors():
                for rank in range(stored.m):
                    stored.shard(rank).verify()
            return [text for file in _files(source.path) for text in unsound(file)]
    except CheckpointError as e:
        ours = os.path.isfile(os.path.join(path, MANIFEST))
        return _problems_of_ours(path, tell, str(e)) if ours else [str(e)]


def _files(path: str) -> list[str]:
    walked = os.walk(path) if os.path.isdir(path) else [("", [], [path])]
    return sorted(os.path.join(folder, name) for folder, _, names in walked for name in names)


def _problems_of_ours(path: StrPath, tell: Tell, first: str) -> list[str]:
    """All of them where the directory can be opened at all."""
    with ExitStack() as stack:
        try:
            checkpoint = Checkpoint(path, stack)
        except CheckpointError as e:
            return [str(e)]
        return list(dict.fromkeys([first, *_problems(checkpoint, tell)]))


def _problems(checkpoint: Checkpoint, tell: Tell) -> Iterator[str]:
    manifest = checkpoint.manifest
    tick = Steps(sum(record.size for record in manifest.files.values()), tell)
    for name in manifest.rank_dirs:
        folder = os.path.join(checkpoint.path, name)
        with naming("list", folder):
            held = {f"{name}/{file}" for file in os.listdir(folder)}
        for surplus in sorted(held - manifest.files.keys()):
            yield f"{os.path.join(checkpoint.path, surplus)} is not listed in {MANIFEST}"
    for name, record in manifest.files.items():
        try:
            file = checkpoint.file(name)
            if crc32_of(file, tick) != record.crc32:
                yield f"{file} is damaged: {MANIFEST} has another crc32"
        except CheckpointError as e:
            yield str(e)
    for pp_rank in range(manifest.axis("pp")):
        for rank in range(checkpoint.tp):
            yield from _problems_of_rank(checkpoint, rank, pp_rank)


def _problems_of_rank(checkpoint: Checkpoint, rank: int, pp_rank: int) -> Iterator[str]:
    try:
        view = View(checkpoint, rank, checkpoint.tp, pp_rank)
        found = list(leaves(view.tree))
    except CheckpointError as e:
        yield str(e)
        return
    for path, leaf in found:
        if is_tensor(leaf):
            try:
                view.stored(leaf, spell(path)).first.verify()
            except CheckpointError as e:
                yield str(e)
