"""The tensors in a checkpoint, the differences between two, and the check of files and checksums."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from tpcore.checkpoint.forms.native import Native
from tpcore.checkpoint.forms.pickles import unsound
from tpcore.checkpoint.forms.source import Reading, Source
from tpcore.checkpoint.read.source import ShardRule, StrPath, opened, specs_by, tensors_of, unsharded
from tpcore.checkpoint.storage.files import CHUNK, MANIFEST, SILENT, Progress, crc32_of, naming
from tpcore.checkpoint.storage.tensorfile import dtype_name, nbytes_of
from tpcore.checkpoint.stored import Stored
from tpcore.checkpoint.tree import Leaf, leaves
from tpcore.errors import CheckpointError
from tpcore.layout.layout import Layout


class TensorRow(NamedTuple):
    """One tensor. ``local``: shape of a shard. ``bytes``: of the unsharded tensor. ``padded``: whether a shard is."""

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


def inspect(path: StrPath, *, rules: Sequence[ShardRule] = (), how: Reading | None = None) -> Inspected:
    """The tensors in a checkpoint of any form. For tpcore's own form, including other entries' tensors."""
    with opened(path, how or Reading(), rules) as source:
        rows = [_row(*named) for named in all_tensors(source, rules)]
        return Inspected(source.path, source.form, source.tp, source.pp, rows)


def all_tensors(source: Source, rules: Sequence[ShardRule]) -> Iterable[tuple[str, Stored]]:
    """Those of a model; of tpcore's own form those of other entries too."""
    return source.tensors() if isinstance(source, Native) else tensors_of(source, rules).items()


def _row(name: str, stored: Stored) -> TensorRow:
    local = stored.first.shape
    cut = str(stored.layout.spec).partition(" ")[2] if isinstance(stored.layout, Layout) else stored.layout
    if cut is None:
        cut = "same on all ranks" if stored.bound() is None else "unknown"
    padded = False
    if isinstance(stored.layout, Layout) and stored.layout.cuts:
        padded = stored.layout.padded(stored.mesh)
        copies = sorted({share.copies for share in stored.layout.shares(stored.mesh)} - {1})
        cut += "".join(f", held by {n} ranks each" for n in copies)
    return TensorRow(name, stored.shape, dtype_name(stored.dtype), cut, local, nbytes_of(stored), padded)


_FEW_RANKS, _MOST_RANKS = 64, 4096  # each has a directory of its own


def check_degree(tp: int, source: Source, rules: Sequence[ShardRule]) -> None:
    """ValueError for so many ranks that no machine has them, or that many would have padding alone."""
    if tp < 1:
        raise ValueError(f"tp={tp} must be 1 or more ranks")
    sharded = [(t.layout, name) for name, t in all_tensors(source, rules) if isinstance(t.layout, Layout)]
    sizes = [(layout.shape[cut.spec.dim or 0], name) for layout, name in sharded for cut in layout.cuts]
    longest, name = max(sizes, default=(_MOST_RANKS, ""))
    most = min(max(longest, _FEW_RANKS), _MOST_RANKS)
    if tp > most:
        why = f": the longest dim that is sharded, of {name!r}, has {longest} entries" if name else ""
        raise ValueError(f"tp={tp} is too many ranks for {source.path}: give {most} or less{why}")


class Difference(NamedTuple):
    """``why``: a missing tensor or another shape or dtype. ``absolute``, ``relative``: largest ones of the values."""

    name: str
    why: str | None
    absolute: float
    relative: float


def diff(
    a: StrPath, b: StrPath, *, rules: Sequence[ShardRule] = (), how: Reading | None = None, progress: Progress = SILENT
) -> Iterator[Difference]:
    """Compare the models in two checkpoints of any form and degree. Yields one entry per differing tensor."""
    how = how or Reading()
    with opened(a, how) as one, opened(b, how) as other:
        tensors, others = (tensors_of(s, rules) for s in (one, other))
        progress.start(sum(map(nbytes_of, tensors.values())))
        for name in dict.fromkeys([*tensors, *others]):
            if name not in tensors or name not in others:
                where = one.path if name in tensors else other.path
                yield Difference(name, f"only in {where}", 0.0, 0.0)
            elif tensors[name].shape != others[name].shape:
                yield Difference(name, f"shape {tensors[name].shape} and {others[name].shape}", 0.0, 0.0)
            else:
                yield from _values(name, tensors[name], others[name])
            if name in tensors:
                progress.add(nbytes_of(tensors[name]))


def _values(name: str, a: Stored, b: Stored) -> Iterator[Difference]:
    why = None if a.dtype == b.dtype else f"dtype {dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
    x, y = unsharded(a).flatten(), unsharded(b).flatten()
    absolute = relative = 0.0
    alike = why is None and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    for i in range(0, 0 if alike else x.numel(), CHUNK):
        absolute, relative = _furthest(x[i : i + CHUNK], y[i : i + CHUNK], absolute, relative)
    if why is not None or absolute > 0 or math.isnan(absolute):
        yield Difference(name, why, absolute, relative)


def _furthest(x: torch.Tensor, y: torch.Tensor, absolute: float, relative: float) -> tuple[float, float]:
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    same = x == y  # before they are rounded: float64 has no 2^53 + 1
    exact = None
    if x.dtype == y.dtype and x.dtype in (torch.int64, torch.uint64):
        exact = (x.view(torch.int64) - y.view(torch.int64)).abs()
    x, y = x.to(wide), y.to(wide)
    same |= x.isnan() & y.isnan()
    gap = (x - y).abs()
    if exact is not None:  # of near numbers; that of numbers far apart does not fit into 64 bits
        gap = torch.where(gap < 2**53, exact.to(wide), gap)
    gap = gap.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    size = torch.maximum(x.abs(), y.abs()).nan_to_num(nan=1.0, posinf=math.inf)
    ratio = (gap / size).masked_fill(same, 0.0).nan_to_num(nan=math.inf)
    return max(absolute, float(gap.max())), max(relative, float(ratio.max()))


def verify(
    path: StrPath, *, rules: Sequence[ShardRule] = (), how: Reading | None = None, progress: Progress = SILENT
) -> list[str]:
    """Error texts for all faults of a checkpoint: missing, surplus and damaged files and tensors."""
    try:
        with opened(path, how or Reading(), rules) as source:
            if isinstance(source, Native):
                return list(dict.fromkeys(_problems(source, progress)))
            for stored in tensors_of(source, rules).values():
                for rank in range(stored.mesh.size):
                    stored.shard(rank).verify()
            return [text for file in _files(source.path) for text in unsound(file)]
    except CheckpointError as e:
        return [str(e)]


def without_checksums(path: StrPath) -> list[str]:
    """The files that ``verify`` can but read: those of a checkpoint of another library that are no zip archives."""
    if os.path.exists(os.path.join(path, MANIFEST)):
        return []
    return [file for file in _files(os.fspath(path)) if not zipfile.is_zipfile(file)]


def _files(path: str) -> list[str]:
    walked = os.walk(path) if os.path.isdir(path) else [("", [], [path])]
    return sorted(os.path.join(folder, name) for folder, _, names in walked for name in names)


def _problems(source: Native, progress: Progress) -> Iterator[str]:
    manifest = source.manifest
    progress.start(sum(record.size for record in manifest.files.values()))
    for name in manifest.rank_dirs:
        folder = os.path.join(source.path, name)
        with naming("list", folder):
            files = {f"{name}/{file}" for file in os.listdir(folder)}
        for surplus in sorted(files - manifest.files.keys()):
            yield f"{os.path.join(source.path, surplus)} is not listed in {MANIFEST}"
    for name, record in manifest.files.items():
        try:
            file = source.file(name)
            if crc32_of(file, progress) != record.crc32:
                yield f"{file} is damaged: {MANIFEST} has another crc32"
        except CheckpointError as e:
            yield str(e)
    for pp_rank, rank in product(range(source.pp), range(source.tp)):
        try:
            stage = source.stage(pp_rank, rank, specs_by(()))
        except CheckpointError as e:
            yield str(e)
            continue
        for path, leaf in leaves(stage.state):
            try:
                if isinstance(leaf, Leaf):
                    stage.stored(leaf, path).first.verify()
            except CheckpointError as e:
                yield str(e)
