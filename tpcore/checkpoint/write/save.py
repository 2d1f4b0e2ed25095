"""Writes a checkpoint: each rank its part, then rank 0 the manifest."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...comm.comm import Comm
from ...errors import CheckpointError
from ...layout.layout import Layout
from ...runtime.consensus import agree, gather, gather_bytes, together
from ...runtime.context import current
from ..manifest import FORMAT, STATE, VERSION, Manifest, keep_last, rank_dir
from ..storage.files import MANIFEST, FileRecord, Progress, bar, dumps, listed, naming, sync_dir, write_file, written_by
from ..storage.publish import Staging, staging_path
from ..storage.tensorfile import dtype_name, write_tensors
from .snapshot import Entry, Part, StateTensor, on_host, resolve, total_of

Tables = Mapping[str, Mapping[str, tuple[str, bool]]]
"""By scope, by name: a tensor's description, and whether a rank may lack it. Ranks that have a scope must agree."""


@dataclass(frozen=True)
class Options:
    """Those of ``tpcore.checkpoint.save``."""

    background: bool = False
    in_turn: bool = False
    share_writes: bool = False
    dtype: torch.dtype | None = None
    keep_last: int | None = None  # of rank 0

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if name != "keep_last")


def _described(entry: Entry) -> dict[str, Any]:
    """The record of a tensor in ``state.json``, except its checksum."""
    record = {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape)}
    if isinstance(entry.layout, Layout):
        # without the slot, which the directories of the shards imply
        axes = [axis for cut in entry.layout.cuts for axis in cut.axes]
        return record | {"spec": entry.layout.spec.to_json(), "axes": axes}
    return record | {"spec": entry.layout}


def write_tensor_files(
    root: str, name: str, save_id: str, files: Mapping[str, Mapping[str, Entry]], progress: Progress
) -> tuple[dict[str, FileRecord], dict[str, Any]]:
    """Write files of tensors to the directory ``name`` of ``root``. Returns records of files and tensors."""
    here = os.path.join(root, name)
    if not os.path.isdir(root):
        raise CheckpointError(f"{root}, made by rank 0, is not here: do all ranks share the file system?")
    with naming("make the directory", here), suppress(FileExistsError):
        os.mkdir(here)
    records, tensors = {}, {}
    for file, entries in sorted(files.items()):
        metadata = {"format": "pt", "save_id": save_id, "rank": name}
        records[f"{name}/{file}"], sums = write_tensors(os.path.join(here, file), entries, metadata, progress)
        tensors[file] = {key: _described(entry) | {"crc32": sums[key]} for key, entry in entries.items()}
    return records, tensors


def write_state(root: str, name: str, save_id: str, tensors: Any, tree: Any) -> dict[str, FileRecord]:
    """Write a directory's state: the record of each tensor, and the encoded entries."""
    state = {"format": FORMAT, "version": VERSION, "save_id": save_id, "rank": name, "tensors": tensors, "state": tree}
    here = os.path.join(root, name)
    record = write_file(os.path.join(here, STATE), [dumps(state)])
    sync_dir(here)
    return {f"{name}/{STATE}": record}


def put_in_place(staging: Staging, save_id: str, mesh: Mapping[str, int], files: Mapping[str, FileRecord]) -> None:
    """Write the manifest of the ranks' files, and publish the checkpoint under its name."""
    manifest, path = Manifest(save_id, dict(mesh), files, written_by()), os.path.join(staging.path, MANIFEST)
    manifest.check(path)  # before it replaces a valid checkpoint
    write_file(path, [manifest.to_json()])
    sync_dir(staging.path)
    staging.commit()


class Save:
    """One save on one rank. The constructor is collective; ``write`` may run in a thread of its own."""

    def __init__(self, state: dict[Any, Any], path: str | os.PathLike[str], options: Options) -> None:
        self.ctx, self.options = current(), options
        ctx = self.ctx
        # on all ranks, also those that write nothing: pending computations may need them
        ctx.backend.mark_step()
        self._dp = ctx.index(ctx.data), ctx.data.size
        self._first, self._shared = self._dp[0] == 0, False
        self._part: Part | None = None
        self._files: dict[str, dict[str, StateTensor]] = {}
        self.staging: Staging | None = None
        with together(ctx):
            self._prepare(state)
        if self._part is not None:
            self._part.gather(self._files)
        with together(ctx):
            if options.background:
                self._files = on_host(self._files)
        # rank 0's path counts: a relative path may differ between ranks
        at = ctx.mesh.coords(ctx.rank)
        tables: Tables = {} if self._part is None else _outline(self._part, at.get("pp", 0), at.get("tp", 0))
        request = [uuid.uuid4().hex, os.path.realpath(path), str(options), _digests_of(tables)]
        ids, targets, every, digests = zip(*gather(request, ctx.world), strict=True)
        self.save_id, self.target = ids[0], targets[0]
        text = "ranks save in different ways: rank 0 with {}, rank {} with {}"
        agree(every, lambda rank, first, other: ValueError(text.format(first, rank, other)))
        _check_agreement(self.target, tables, digests, ctx.world)
        self.root = staging_path(self.target, self.save_id)
        with together(ctx), naming("save", self.target):
            if ctx.rank == 0:
                self.staging = Staging(self.target, self.save_id, FORMAT, others_stay=True)

    def _prepare(self, state: dict[Any, Any]) -> None:
        (state, layout_of_entry, gather), options, ep = resolve(state, self.ctx), self.options, self.ctx.over_axis("ep")
        self._shared = self._dp[1] > 1 and (options.share_writes or bool(gather) or ep is not None)
        if not (self._first or self._shared):
            return
        self._part = Part(state, layout_of_entry, self.ctx.backend.memory_of, gather=gather, ep=ep, dtype=options.dtype)
        self._files = self._part.share(*(self._dp if self._shared else (0, 1)), all_of_it=options.share_writes)

    def name_of(self, rank: int) -> str:
        at = self.ctx.mesh.coords(rank)
        return rank_dir(at.get("tp", 0), at.get("pp", 0), self.ctx.mesh.axes.get("pp", 1))

    def write(self) -> bytes:
        """Write this rank's tensors, rank 0 with a bar. Returns the rank's report for ``put_together``."""
        if self._part is None:
            return b"null"
        name = self.name_of(self.ctx.rank)
        total = partial(total_of, self._files)
        with naming("save", self.target), bar("saving", total, shown=self.ctx.rank == 0) as progress:
            records, tensors = write_tensor_files(self.root, name, self.save_id, self._files, progress)
            if self._shared:
                sync_dir(os.path.join(self.root, name))
        tree = self._part.tree if self._first else None
        self._part, self._files = None, {}  # frees the copy of a background save
        return json.dumps([name, records, tensors, tree]).encode()

    def put_together(self, reports: Sequence[bytes]) -> None:
        """On rank 0: write each directory's state and the manifest, and publish the checkpoint."""
        if self.staging is None:
            return
        files: dict[str, FileRecord] = {}
        tensors: dict[str, dict[str, Any]] = defaultdict(dict)
        trees: dict[str, Any] = {}
        for data in reports:
            report = json.loads(data)
            if report is not None:
                name, records, its_tensors, tree = report
                files |= {path: FileRecord(*record) for path, record in records.items()}
                tensors[name] |= its_tensors
                trees[name] = trees.get(name) or tree
        with naming("save", self.target):
            for name, tree in trees.items():
                files |= write_state(self.root, name, self.save_id, tensors[name], tree)
            put_in_place(self.staging, self.save_id, self.ctx.mesh.axes, files)
            if self.options.keep_last is not None:
                keep_last(self.target, self.options.keep_last)

    def close(self) -> None:
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.close()


def write_checkpoint(state: dict[Any, Any], path: str | os.PathLike[str], options: Options) -> None:
    """Write ``state`` as the checkpoint ``path``, each tp rank its part. Collective over the world. If a rank
    fails, all ranks raise an error, and the previous checkpoint stays."""
    save = Save(state, path, options)
    ctx, report = save.ctx, b"null"
    try:
        for turn in range(ctx.mesh.size) if options.in_turn else (ctx.rank,):
            with together(ctx):
                if turn == ctx.rank:
                    report = save.write()
        reports = gather_bytes(report, ctx.world)
        with together(ctx):
            save.put_together(reports)
    finally:
        save.close()


# -- what ranks must agree on before a save: the tensors that they hold parts of, or write shares of. Plain values and
# tensors that no layer shards may differ: a load at another degree compares them itself.
def _outline(part: Part, stage: int, tp_rank: int) -> Tables:
    """The tensors that all ranks must agree on (sharded over stages too), those of one stage (over tp), and those of
    one directory, of which each dp rank writes a share. An optimizer has no state of a parameter that had no gradient
    yet, so another rank may lack it."""
    scopes = everywhere, of_stage, of_directory = "", f"{stage}", f"{stage} {tp_rank}"
    tables: dict[str, dict[str, tuple[str, bool]]] = {scope: {} for scope in scopes}
    for file, name, entry, written in part.placed():
        record, key = _described(entry), f"{name!r} of {file}"
        spec, text = record["spec"], f"{record['dtype']} of shape {record['shape']}"
        if axes := record.get("axes"):
            text += f", cut of {spec['shape']} along dim {spec['dim']} over {' and '.join(axes)}"
            if len(spec["blocks"]) > 1 or spec["blocks"][0][1:] != [1, False]:
                text += f" in blocks {spec['blocks']}"
            tables[everywhere if "pp" in axes else of_stage][key] = text, file in part.optional
        if written != file:
            tables[of_directory][key] = f"{text} in {written}", False
    return tables


def _digests_of(tables: Tables) -> dict[str, str]:
    texts = {scope: json.dumps(table, sort_keys=True) for scope, table in tables.items()}
    return {scope: hashlib.sha256(text.encode()).hexdigest()[:32] for scope, text in texts.items()}


def _check_agreement(path: str, tables: Tables, digests: Sequence[Mapping[str, str]], world: Comm) -> None:
    """CheckpointError, on all ranks, if the ranks' parts of the save ``path`` do not fit together: where their
    ``digests`` differ, all ranks exchange the tables. A rank that writes nothing has no digests."""
    first: dict[str, int] = {}
    pairs = [
        (scope, first[scope], rank)
        for rank, here in enumerate(digests)
        for scope, digest in here.items()
        if digests[first.setdefault(scope, rank)][scope] != digest
    ]
    if not pairs:
        return
    tables_of = gather(tables, world)
    lines = []
    for scope, a, b in pairs:
        for key in sorted(tables_of[a][scope].keys() | tables_of[b][scope].keys()):
            x, y = (tables_of[rank][scope].get(key) for rank in (a, b))
            optional = (x or y)[1] and None in (x, y)
            if x != y and not optional:
                texts = [f"rank {rank} has {'none' if of is None else of[0]}" for rank, of in ((a, x), (b, y))]
                lines.append(f"{key}: {', '.join(texts)}")
    if lines:
        title = f"cannot save {path}: the ranks' parts do not fit together. Build one model on all ranks"
        raise CheckpointError(listed(title, lines))
