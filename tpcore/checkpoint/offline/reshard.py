"""Sharded checkpoints out of checkpoints of other degrees, or of other libraries."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...storage.jsonfile import FileRecord
from ...storage.progress import Steps, Tell, Tick, nothing
from ...storage.publish import Staging
from ..format.directory import View
from ..format.manifest import rank_dir
from ..format.stored import Stored
from ..format.tree import is_tensor, leaves, only, spell, with_entry
from ..forms.pickled import why_bound
from ..forms.whole import Reading
from ..read.lazy import Lazy, once
from ..read.source import CutRule, Source, opened
from ..write.save import put_in_place, write_state, write_tensor_files
from ..write.snapshot import Entry, Part, total_of
from .consolidate import StrPath


class RankContents(NamedTuple):
    """What goes into one rank's directory: the state, encoded, and its tensors by file and name."""

    tree: Any
    files: Mapping[str, Mapping[str, Entry]]

    def write(self, root: str, name: str, save_id: str, tick: Tick) -> dict[str, FileRecord]:
        records, tensors = write_tensor_files(root, name, save_id, self.files, tick)
        return records | write_state(root, name, save_id, tensors, self.tree)


def reshard(
    src: StrPath,
    out: StrPath,
    tp: int,
    *,
    strict: bool = True,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    tell: Tell = nothing,
) -> list[str]:
    """Write what ``src`` holds as a checkpoint for ``tp`` ranks; returns what was left out, and why.

    ``strict=False`` leaves out entries that can be had only at the degree at which they were saved.
    """
    if tp < 1:
        raise ValueError(f"tp={tp} is no number of ranks")
    left: list[str] = []
    with opened(src, how or Reading(), rules) as source:
        pp = source.pp if source.checkpoint else 1
        ranks = {
            rank_dir(rank, stage, pp): _rank_of(source, rank, tp, stage, None if strict else left)
            for stage in range(pp)
            for rank in range(tp)
        }
        tick = Steps(sum(total_of(rank.files) for rank in ranks.values()), tell)
        with staged(out) as (staging, save_id):
            files: dict[str, FileRecord] = {}
            for name, rank in ranks.items():
                files |= rank.write(staging.path, name, save_id, tick)
            put_in_place(staging, save_id, {"pp": pp, "tp": tp}, files)
    return left


def _rank_of(source: Source, rank: int, n: int, stage: int, left: list[str] | None) -> RankContents:
    """One rank of ``n``. ``left``: where to add what is left out; None makes that an error."""
    if source.checkpoint is None:
        return _rank_of_model(source, rank, n, left)
    view = View(source.checkpoint, rank, n, stage)
    kept = dict(view.entries)
    for key in view.entries:
        why = view.bound(key)
        if why is not None and left is None:
            raise CheckpointError(f"{why}. It can be left out")
        if why is not None and left is not None:
            del kept[key]
            left.extend([why] if why not in left else [])
    tree, files = only(view.tree, kept), dict[str, dict[str, Lazy]]()
    for path, leaf in leaves(tree):
        if is_tensor(leaf):
            lazy = Lazy(view.stored(leaf, spell(path)), rank, n)
            files.setdefault(leaf["file"], {})[leaf["name"]] = lazy
    return RankContents(tree, files)


def _rank_of_model(source: Source, rank: int, n: int, left: list[str] | None) -> RankContents:
    """Of what others wrote: the model, and what lies beside it on all ranks alike."""
    if source.bound:
        why = why_bound(source.bound, source.path, source.tp)
        if left is None:
            raise CheckpointError(f"{why}. It can be left out")
        left.extend([why] if why not in left else [])
    tensors, ties = once(source)
    names = {name: name for name in tensors} | ties
    file = "model.safetensors"
    plain = {k: v for k, v in source.model.items() if not isinstance(v, Stored)}
    if plain:
        raise CheckpointError(f"{source.path}: {sorted(plain)[0]!r} is no tensor; only a model can say it")
    rest = Part({key: value for key, value in source.rest.items() if key != "model"}, lambda t, where: None)
    tree = {k: {"$": "tensor", "file": file, "name": names[k]} for k in source.model}
    model = {k: Lazy(_recorded(t.stored), rank, n) for k, t in tensors.items()}
    return RankContents(with_entry(rest.tree, "model", tree), {file: model, **rest.files})


def _recorded(stored: Stored) -> Stored:
    """With its cut, which is none where all ranks hold the same."""
    cut, _ = stored.whole()
    return Stored(stored.where, cut, stored.m if cut is stored.cut else 1, None, stored.shard)


@contextmanager
def staged(out: StrPath) -> Iterator[tuple[Staging, str]]:
    save_id = uuid.uuid4().hex
    staging = Staging(os.path.realpath(out), save_id)
    try:
        yield staging, save_id
    finally:
        staging.close()
