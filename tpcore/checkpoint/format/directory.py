"""An opened checkpoint, and what one rank sees of it."""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack
from typing import Any

from ...errors import CheckpointError
from ...shard import ShardSpec
from ...storage.crc32 import spelled
from ...storage.dtypes import dtype_of
from ...storage.files import naming, read_file
from ...storage.jsonfile import MANIFEST, PREFIX, loads
from ...storage.publish import resolve
from ...storage.tensorfile import TensorFile
from .cuts import Cut
from .manifest import STATE, Manifest, check_format, rank_dir
from .stored import FileShard, Stored
from .tree import entries, is_tensor, leaves, spell


class Checkpoint:
    """The directory, its manifest checked. Files are opened when asked for and closed with ``stack``."""

    def __init__(self, load_dir: str | os.PathLike[str], stack: ExitStack) -> None:
        self.path = resolve(os.path.realpath(load_dir))
        self.stack = stack
        if not os.path.isdir(self.path):
            what = "is a file: give sharded=False" if os.path.exists(self.path) else "does not exist"
            raise CheckpointError(f"{os.fspath(load_dir)} {what}")
        manifest = os.path.join(self.path, MANIFEST)
        with naming("list", self.path):
            names = os.listdir(self.path)
        if MANIFEST not in names:
            held = f"it holds {sorted(names)[:3]}" if names else "it is empty"
            raise CheckpointError(f"{self.path} is no checkpoint: {manifest} is missing ({held})")
        self.manifest = Manifest.from_json(read_file(manifest), manifest)
        here = {name for name in names if name.startswith(PREFIX)}
        for surplus in sorted(here - set(self.manifest.rank_dirs)):
            raise CheckpointError(f"{os.path.join(self.path, surplus)} is of no rank that {manifest} lists")
        for missing in sorted(set(self.manifest.rank_dirs) - here):
            raise CheckpointError(f"{os.path.join(self.path, missing)} is missing")
        self._ranks: dict[str, RankState] = {}

    @property
    def tp(self) -> int:
        return self.manifest.axis("tp")

    def rank(self, tp_rank: int, pp_rank: int = 0) -> RankState:
        name = rank_dir(tp_rank, pp_rank, self.manifest.axis("pp"))
        if name not in self._ranks:
            self._ranks[name] = RankState(self, name)
        return self._ranks[name]

    def file(self, name: str) -> str:
        """Path of a file on the manifest, which has the size that is on record there."""
        path = os.path.join(self.path, *name.split("/"))
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{path} is not listed in {os.path.join(self.path, MANIFEST)}")
        if os.path.realpath(path) != path:
            raise CheckpointError(f"{path} is a link: a checkpoint's files lie in its directory")
        with naming("open", path):
            size = os.stat(path).st_size
        if size != record.size:
            raise CheckpointError(
                f"{path} has {size} bytes, not {record.size} as written: truncated or replaced"
            )
        return path


class RankState:
    """One rank's directory: its state, still encoded, and its tensors."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        self.path = checkpoint.file(f"{name}/{STATE}")
        data = read_file(self.path)
        if checkpoint.manifest.files[f"{name}/{STATE}"].crc32 != spelled(zlib.crc32(data)):
            raise CheckpointError(
                f"{self.path} is damaged, or of another save: {MANIFEST} has another checksum"
            )
        top = loads(data, self.path)
        check_format(top, self.path)
        self._check_save(top.get("save_id"), top.get("rank"), self.path)
        try:
            self.tree: Any = top["state"]
            self._records: dict[str, dict[str, Any]] = top["tensors"]
        except KeyError as e:
            raise CheckpointError(f"{self.path} is damaged: no {e}") from e
        self._files: dict[str, TensorFile] = {}

    def _check_save(self, save_id: Any, rank: Any, path: str) -> None:
        if save_id != self._checkpoint.manifest.save_id:
            raise CheckpointError(f"{path} is of another save than {MANIFEST}: {save_id}")
        if rank != self._name:
            raise CheckpointError(f"{path} is of the directory {rank}")

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            opened = TensorFile(self._checkpoint.file(f"{self._name}/{file}"))
            self._checkpoint.stack.callback(opened.close)
            self._check_save(opened.metadata.get("save_id"), opened.metadata.get("rank"), opened.path)
            self._files[file] = opened
        return self._files[file]

    def tensor(self, file: str, name: str) -> tuple[FileShard, Cut]:
        try:
            record = self._records[file][name]
            dtype, shape = dtype_of(record["dtype"]), tuple(int(s) for s in record["shape"])
            cut: Cut = record["spec"]
            if isinstance(cut, dict):
                cut = ShardSpec.from_json(cut)
            crc32 = str(record["crc32"])
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CheckpointError(f"{self.path}: the record of {name!r} in {file} is damaged: {e!r}") from e
        return FileShard(self._open(file), self._open(file).recorded(name, dtype, shape, crc32)), cut


class View:
    """What rank ``rank`` of ``n`` sees of a checkpoint that was saved at any degree."""

    def __init__(self, checkpoint: Checkpoint, rank: int, n: int, pp_rank: int = 0) -> None:
        self._checkpoint, self._pp_rank = checkpoint, pp_rank
        self._own = rank if n == checkpoint.tp else None
        self._first = checkpoint.rank(rank if self._own is not None else 0, pp_rank)
        self.path = checkpoint.path
        self.tree = self._first.tree
        self.entries = entries(self.tree)

    def difference(self, key: Any) -> str | None:
        """Where the ranks disagree about a top-level entry, if this one has to stand for all of them."""
        if self._own is not None:
            return None
        mine = self.entries[key]
        for i in range(1, self._checkpoint.tp):
            theirs = entries(self._checkpoint.rank(i, self._pp_rank).tree).get(key)
            if theirs != mine:
                a, b = dict(leaves(mine, (key,))), dict(leaves(theirs, (key,)))
                path = next((p for p in a if a[p] != b.get(p)), (key,))
                return (
                    f"{spell(path)} can be loaded only at the degree it was saved at, "
                    f"tp={self._checkpoint.tp}: it is {a.get(path)!r} of tp rank 0, {b.get(path)!r} of {i}"
                )
        return None

    def stored(self, tree: dict[str, Any], where: str) -> Stored:
        """The tensor that an encoded entry stands for."""
        try:
            file, name = str(tree["file"]), str(tree["name"])
        except KeyError as e:
            raise CheckpointError(f"{self._first.path}: {where} is damaged: no {e}") from e
        shard, cut = self._first.tensor(file, name)
        m = self._checkpoint.tp
        if isinstance(cut, ShardSpec) and cut.local_shape(m) != shard.shape:
            raise CheckpointError(f"{self._first.path}: {where} is {shard.shape} and not a shard of {cut}")

        def of(i: int) -> FileShard:
            return self._checkpoint.rank(i, self._pp_rank).tensor(file, name)[0]

        return Stored(where, cut, m, self._own, of)

    def bound(self, key: Any) -> str | None:
        """Why a top-level entry can be loaded only at the degree it was saved at, or None."""
        found = self.difference(key)
        if found is None and self._own is None:
            for path, leaf in leaves(self.entries[key], (key,)):
                found = found or (self.stored(leaf, spell(path)).bound() if is_tensor(leaf) else None)
        return found
