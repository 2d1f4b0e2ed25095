"""Whether a checkpoint is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ...errors import CheckpointError
from ...storage.files import crc32_of, naming
from ...storage.jsonfile import MANIFEST
from ...storage.progress import Steps, Tell, nothing
from ..format.directory import Checkpoint, View
from ..format.tree import is_tensor, leaves, spell
from ..forms.whole import Reading, unsound
from ..read.source import CutRule, opened
from .consolidate import StrPath


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
