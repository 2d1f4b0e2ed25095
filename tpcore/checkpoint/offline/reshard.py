"""Conversion of checkpoints of any library: to a given degree, or to the same cut without pickle."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import closing

from ...errors import CheckpointError
from ...layout.mesh import Mesh
from ..format.manifest import FORMAT, rank_dir
from ..forms.native import Native
from ..forms.source import Cuts, Reading, Source
from ..read.source import CutRule, cuts_by, model_of, once, opened, part
from ..storage.files import SILENT, FileRecord, Progress
from ..storage.publish import Staging
from ..tensors.stored import Stored
from ..write.save import put_in_place, write_state, write_tensor_files
from ..write.snapshot import Part, total_of
from .consolidate import StrPath, consolidate, write_one


def reshard(
    src: StrPath,
    out: StrPath,
    tp: int,
    *,
    strict: bool = True,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    progress: Progress = SILENT,
) -> list[str]:
    """Write the contents of ``src`` as a checkpoint for ``tp`` ranks. ``strict=False`` leaves out entries that can be
    loaded only at the degree of the save. Returns why entries were left out."""
    if tp < 1:
        raise ValueError(f"tp={tp} must be 1 or more ranks")
    with opened(src, how or Reading(), rules) as source:
        joined = not isinstance(source, Native)
        _, left = _write(source, out, tp, joined=joined, strict=strict, rules=rules, progress=progress)
    return left


def _write(
    source: Source, out: StrPath, tp: int, *, joined: bool, strict: bool, rules: Sequence[CutRule], progress: Progress
) -> tuple[list[str], list[str]]:
    """Write ``source`` for ``tp`` ranks in each of its stages. Returns the names of the ranks' directories, and why
    entries were left out. ``joined``: the stages become one, of the model and the entries that all ranks have alike."""
    cuts, mesh = cuts_by(rules), Mesh({"pp": 1 if joined else source.pp, "tp": tp})
    save_id, target = uuid.uuid4().hex, os.path.realpath(out)
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise CheckpointError(f"{os.fspath(out)} is there already: give another name")
    model = _joined(source, cuts) if joined else {}
    left: dict[str, None] = {}
    files: dict[str, FileRecord] = {}
    with closing(Staging(target, save_id, FORMAT)) as staging:
        for rank in range(mesh.size):
            at = mesh.coords(rank)
            own = at["tp"] if not joined and source.tp == tp else None
            stage = source.stage(at["pp"], own, cuts)
            bound = stage.bound(model=not joined)
            if bound and strict:
                raise CheckpointError(f"{next(iter(bound.values()))}. It can be left out")
            left |= dict.fromkeys(bound.values())
            if joined:
                entries = stage.entries(lambda stored: part(stored, 0, 1), {"model", *bound})
                state = {"model": {name: stored.plan(None, rank, mesh) for name, stored in model.items()}, **entries}
            else:
                state = stage.entries(lambda stored: stored.plan(None, rank, mesh), bound, model=True)  # noqa: B023
            contents, name = Part(state, lambda t, where: None), rank_dir(at["tp"], at["pp"], mesh.axes["pp"])
            if not files:
                progress.start(total_of(contents.files) * mesh.size)  # ranks have about the same size
            records, tensors = write_tensor_files(staging.path, name, save_id, contents.files, progress)
            files |= records | write_state(staging.path, name, save_id, tensors, contents.tree)
        put_in_place(staging, save_id, mesh.axes, files)
    return sorted({name.partition("/")[0] for name in files}), list(left)


def _joined(source: Source, cuts: Cuts) -> dict[str, Stored]:
    """The model of all stages, each tensor once, with an explicit layout: uncut if all ranks hold the same."""
    model = model_of(source, cuts)
    plain = sorted(name for name, item in model.items() if not isinstance(item, Stored))
    if plain:
        raise CheckpointError(f"{source.path}: {plain[0]!r} is not a tensor: only a model can load it")
    plans, ties = once(model, source.path)
    tensors = {}
    for name, plan in plans.items():
        cut, mesh = plan.stored.whole()
        tensors[name] = Stored(plan.stored.where, cut, mesh, None, plan.stored.shard)
    return {name: tensors[ties.get(name, name)] for name in model}


# -- without pickle, in the same cut -------------------------------------------------------------------------
def convert(
    src: StrPath,
    out: StrPath,
    *,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    progress: Progress = SILENT,
) -> list[str]:
    """Write the contents of ``src`` without pickle: shards of other libraries as a checkpoint of the same degree, the
    model in an unsharded file as the file ``out`` if that ends in ``.safetensors``, otherwise as a directory. Returns
    the names of written files or directories."""
    how = how or Reading()
    with opened(src, how, rules) as source:
        if isinstance(source, Native):
            raise CheckpointError(f"{source.path} is a tpcore checkpoint already: consolidate or reshard it")
        if source.mixed:
            reshard(src, out, source.tp, rules=rules, how=how, progress=progress)
            return [rank_dir(rank) for rank in range(source.tp)]
        if source.sharded:
            return _write(source, out, source.tp, joined=False, strict=True, rules=rules, progress=progress)[0]
        if not os.fspath(out).endswith(".safetensors"):
            return consolidate(src, out, how=how, progress=progress)
        target = os.path.realpath(out)
        write_one(source, target, rules, progress)
    return [os.path.basename(target)]
