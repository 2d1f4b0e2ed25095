"""Conversion of other libraries' checkpoints to the same cut without pickle."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from ...errors import CheckpointError
from ..format.manifest import rank_dir
from ..forms.native import Native
from ..forms.source import Reading, Source, Stage
from ..read.source import CutRule, cuts_by, opened
from ..storage.files import FileRecord
from ..storage.progress import Progress
from ..tensors.shards import MemoryShard
from ..tensors.stored import Stored
from ..write.save import put_in_place
from ..write.snapshot import Part, total_of
from .consolidate import StrPath, consolidate, write_one
from .reshard import RankContents, reshard, staged


# -- without pickle, in the same cut -------------------------------------------------------------------------
def convert(
    src: StrPath,
    out: StrPath,
    *,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the contents of ``src`` in the same cut without pickle. Returns the names of written files or
    directories.

    Shards of other libraries become a checkpoint of the same degree, with all entries. The model in an
    unsharded file becomes the file ``out`` if that ends in ``.safetensors``, otherwise a directory.
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
