"""Conversion of checkpoints of any library: to a given degree, or to the same cut without pickle."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import CheckpointError
from ...layout.mesh import Mesh
from ..format.manifest import FORMAT, rank_dir
from ..format.tree import dotted, is_tensor, leaves, with_entry
from ..forms.native import Native, NativeStage
from ..forms.source import Reading, Source, Stage, State
from ..read.source import CutRule, cuts_by, model_of, once, opened, part
from ..storage.files import FileRecord, Progress
from ..storage.publish import Staging
from ..tensors.stored import MemoryShard, ReadPlan, Stored
from ..write.save import put_in_place, write_state, write_tensor_files
from ..write.snapshot import Entry, Part, total_of
from .consolidate import StrPath, consolidate, write_one


class RankContents(NamedTuple):
    """Contents of one rank's directory: the encoded state, and its tensors by file and name."""

    tree: Any
    files: Mapping[str, Mapping[str, Entry]]

    def write(self, root: str, name: str, save_id: str, progress: Progress | None) -> dict[str, FileRecord]:
        records, tensors = write_tensor_files(root, name, save_id, self.files, progress)
        return records | write_state(root, name, save_id, tensors, self.tree)


def reshard(
    src: StrPath,
    out: StrPath,
    tp: int,
    *,
    strict: bool = True,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the contents of ``src`` as a checkpoint for ``tp`` ranks. Returns why entries were left out.

    ``strict=False`` leaves out entries that can be loaded only at the degree of the save.
    """
    if tp < 1:
        raise ValueError(f"tp={tp} must be 1 or more ranks")
    left: dict[str, None] = {}
    with opened(src, how or Reading(), rules) as source:
        native = isinstance(source, Native)
        pp = source.pp if native else 1  # stages of other libraries' checkpoints are joined
        model = {} if native else model_of(source, cuts_by(rules))
        ranks: dict[str, RankContents] = {}
        mesh = Mesh({"pp": pp, "tp": tp})
        for pp_rank, rank in product(range(pp), range(tp)):
            own = rank if native and source.tp == tp else None
            stage = source.stage(pp_rank, own, cuts_by(rules))
            bound = stage.bound(model=native)
            if bound and strict:
                raise CheckpointError(f"{next(iter(bound.values()))}. It can be left out")
            left |= dict.fromkeys(bound.values())
            name = rank_dir(rank, pp_rank, pp)
            if isinstance(stage, NativeStage):
                ranks[name] = _rank_of(stage, bound, mesh.rank({"pp": pp_rank, "tp": rank}), mesh)
            else:
                ranks[name] = _rank_of_model(model, stage, bound, rank, mesh, source.path)
        if progress is not None:
            progress.start(sum(total_of(rank.files) for rank in ranks.values()))
        with staged(out) as (staging, save_id):
            files: dict[str, FileRecord] = {}
            for name, contents in ranks.items():
                files |= contents.write(staging.path, name, save_id, progress)
            put_in_place(staging, save_id, mesh.axes, files)
    return list(left)


def _rank_of(stage: NativeStage, without: Collection[Any], rank: int, mesh: Mesh) -> RankContents:
    """Contents for ``rank`` of ``mesh``: the same entries in files of the same names."""
    tree, files = stage.encoded(without, model=True), dict[str, dict[str, ReadPlan]]()
    for path, leaf in leaves(tree):
        if is_tensor(leaf):
            plan = stage.stored(leaf, dotted(path)).plan(None, rank, mesh)
            files.setdefault(leaf["file"], {})[leaf["name"]] = plan
    return RankContents(tree, files)


def _rank_of_model(
    model: State, stage: Stage, without: Collection[Any], rank: int, mesh: Mesh, path: str
) -> RankContents:
    """Contents for ``rank`` from another library's checkpoint: the model, and entries equal on all ranks."""
    plain = sorted(name for name, item in model.items() if not isinstance(item, Stored))
    if plain:
        raise CheckpointError(f"{path}: {plain[0]!r} is not a tensor: only a model can load it")
    tensors, ties = once(model, path)
    names = {name: name for name in tensors} | ties
    file = "model.safetensors"
    rest = Part(stage.entries(lambda s: part(s, 0, 1), {"model", *without}), lambda t, where: None)
    tree = {k: {"$": "tensor", "file": file, "name": names[k]} for k in model}
    shards = {k: _recorded(plan.stored).plan(None, rank, mesh) for k, plan in tensors.items()}
    return RankContents(with_entry(rest.tree, "model", tree), {file: shards, **rest.files})


def _recorded(stored: Stored) -> Stored:
    """``stored`` with an explicit layout, which is uncut if all ranks hold the same."""
    cut, mesh = stored.whole()
    return Stored(stored.where, cut, mesh, None, stored.shard)


@contextmanager
def staged(out: StrPath) -> Iterator[tuple[Staging, str]]:
    """A directory to write the checkpoint ``out`` to. CheckpointError if ``out`` exists and is not empty."""
    save_id, target = uuid.uuid4().hex, os.path.realpath(out)
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise CheckpointError(f"{os.fspath(out)} is there already: give another name")
    staging = Staging(target, save_id, FORMAT)
    try:
        yield staging, save_id
    finally:
        staging.close()


# -- without pickle, in the same cut -------------------------------------------------------------------------
def convert(
    src: StrPath,
    out: StrPath,
    *,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the contents of ``src`` in the same cut without pickle. Returns the names of written files or directories.

    Shards of other libraries become a checkpoint of the same degree, with all entries. The model in an unsharded file
    becomes the file ``out`` if that ends in ``.safetensors``, otherwise a directory.
    """
    how = how or Reading()
    with opened(src, how, rules) as source:
        if isinstance(source, Native):
            raise CheckpointError(f"{source.path} is a tpcore checkpoint already: consolidate or reshard it")
        if source.mixed:
            reshard(src, out, source.tp, rules=rules, how=how, progress=progress)
            return [rank_dir(rank) for rank in range(source.tp)]
        if source.sharded:
            return _convert_shards(source, out, how, rules, progress)
        if not os.fspath(out).endswith(".safetensors"):
            return consolidate(src, out, how=how, progress=progress)
        target = os.path.realpath(out)
        write_one(source, target, rules, progress)
    return [os.path.basename(target)]


def _convert_shards(
    source: Source, out: StrPath, how: Reading, rules: Sequence[CutRule], progress: Progress | None
) -> list[str]:
    pp, files = source.pp, dict[str, FileRecord]()
    with staged(out) as (staging, save_id):
        for pp_rank in range(pp):
            for tp_rank in range(source.tp):
                rank = _rank_of_shards(source.stage(pp_rank, tp_rank, cuts_by(rules)), how)
                if progress is not None and not files:
                    progress.start(total_of(rank.files) * source.tp * pp)  # ranks have about the same size
                files |= rank.write(staging.path, rank_dir(tp_rank, pp_rank, pp), save_id, progress)
        put_in_place(staging, save_id, {"pp": pp, "tp": source.tp}, files)
    return sorted({name.partition("/")[0] for name in files})


def _rank_of_shards(stage: Stage, how: Reading) -> RankContents:
    """The shards of one rank, mapped and read only when they are written."""
    model = stage.model()
    shards = {name: _tensor(s) if isinstance(s, Stored) else s for name, s in model.items()}
    cuts = {id(shards[name]): s.cut for name, s in model.items() if isinstance(s, Stored)}
    part = Part({how.model_key: shards, **stage.entries(_tensor)}, lambda t, where: cuts.get(id(t)))
    return RankContents(part.tree, part.files)


def _tensor(stored: Stored) -> Tensor:
    shard = stored.first
    if not isinstance(shard, MemoryShard):
        raise TypeError(f"{shard} is not from a pickle")
    return shard.tensor
