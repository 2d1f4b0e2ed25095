"""Check of a checkpoint's files and checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ...errors import CheckpointError
from ..format.tree import dotted, is_tensor, leaves
from ..forms.native import Native, NativeStage
from ..forms.pickles import unsound
from ..forms.source import Reading
from ..read.source import CutRule, cuts_by, opened, tensors_of
from ..storage.files import MANIFEST, crc32_of, naming
from ..storage.progress import Progress
from .consolidate import StrPath


def verify(
    path: StrPath,
    *,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Error texts for all faults of a checkpoint: missing, surplus and damaged files and tensors."""
    with ExitStack() as stack:
        try:
            source = stack.enter_context(opened(path, how or Reading(), rules))
        except CheckpointError as e:
            return [str(e)]
        if isinstance(source, Native):
            return list(dict.fromkeys(_problems(source, progress)))
        try:
            for stored in tensors_of(source, rules).values():
                for rank in range(stored.mesh.size):
                    stored.shard(rank).verify()
        except CheckpointError as e:
            return [str(e)]
        return [text for file in _files(source.path) for text in unsound(file)]


def _files(path: str) -> list[str]:
    walked = os.walk(path) if os.path.isdir(path) else [("", [], [path])]
    return sorted(os.path.join(folder, name) for folder, _, names in walked for name in names)


def _problems(source: Native, progress: Progress | None) -> Iterator[str]:
    checkpoint, manifest = source.checkpoint, source.checkpoint.manifest
    if progress is not None:
        progress.start(sum(record.size for record in manifest.files.values()))
    for name in manifest.rank_dirs:
        folder = os.path.join(checkpoint.path, name)
        with naming("list", folder):
            held = {f"{name}/{file}" for file in os.listdir(folder)}
        for surplus in sorted(held - manifest.files.keys()):
            yield f"{os.path.join(checkpoint.path, surplus)} is not listed in {MANIFEST}"
    for name, record in manifest.files.items():
        try:
            file = checkpoint.file(name)
            if crc32_of(file, progress) != record.crc32:
                yield f"{file} is damaged: {MANIFEST} has another crc32"
        except CheckpointError as e:
            yield str(e)
    for pp_rank in range(source.pp):
        for rank in range(source.tp):
            try:
                yield from _damaged(source.stage(pp_rank, rank, cuts_by(())))
            except CheckpointError as e:
                yield str(e)


def _damaged(stage: NativeStage) -> Iterator[str]:
    for path, leaf in leaves(stage.tree):
        if is_tensor(leaf):
            try:
                stage.stored(leaf, dotted(path)).first.verify()
            except CheckpointError as e:
                yield str(e)
