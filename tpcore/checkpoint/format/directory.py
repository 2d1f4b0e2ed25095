"""An open tpcore checkpoint and the directories of its ranks."""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack
from typing import Any

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...layout.mesh import Mesh
from ...layout.shard import ShardSpec
from ..storage.dtypes import dtype_of
from ..storage.files import MANIFEST, PREFIX, crc32_text, loads, naming, read_file
from ..storage.tensorfile import FileTensor, TensorFile
from ..tensors.stored import Cut
from .manifest import STATE, Manifest, check_format, rank_dir
from .tree import decode, entries


class Checkpoint:
    """A directory with a valid manifest. Files are opened at first use and closed with ``stack``."""

    def __init__(self, load_dir: str | os.PathLike[str], stack: ExitStack) -> None:
        self.path = os.path.realpath(load_dir)
        self.stack = stack
        manifest = os.path.join(self.path, MANIFEST)
        with naming("list", self.path):
            names = os.listdir(self.path)
        self.manifest = Manifest.from_json(read_file(manifest), manifest)
        here, listed = {name for name in names if name.startswith(PREFIX)}, set(self.manifest.rank_dirs)
        for surplus in sorted(here - listed):
            raise CheckpointError(f"{os.path.join(self.path, surplus)} is of no rank that {manifest} lists")
        for missing in sorted(listed - here):
            raise CheckpointError(f"{os.path.join(self.path, missing)} is missing")
        self.tp, self.pp = self.manifest.axis("tp"), self.manifest.axis("pp")
        self._stage, self._stages = Mesh({"tp": self.tp}), Mesh({"pp": self.pp, "tp": self.tp})
        self._ranks: dict[tuple[int, int], RankState] = {}

    def mesh_of(self, cut: Cut) -> Mesh:
        """The mesh of a tensor's shards: tp ranks of one stage, or of all if it is cut over stages too."""
        return self._stages if isinstance(cut, Layout) and "pp" in cut.axes else self._stage

    def rank(self, tp_rank: int, pp_rank: int = 0) -> RankState:
        at = tp_rank, pp_rank
        if at not in self._ranks:
            self._ranks[at] = RankState(self, rank_dir(tp_rank, pp_rank, self.pp))
        return self._ranks[at]

    def file(self, name: str) -> str:
        """Path of a file. CheckpointError if the manifest does not list it, or lists another size."""
        path = os.path.join(self.path, *name.split("/"))
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{path} is not listed in {os.path.join(self.path, MANIFEST)}")
        if os.path.realpath(path) != path:
            raise CheckpointError(f"{path} is a link: a checkpoint's files lie in its directory")
        with naming("open", path):
            size = os.stat(path).st_size
        if size != record.size:
            raise CheckpointError(f"{path} has {size} bytes, not {record.size} as written: truncated or replaced")
        return path


class RankState:
    """One rank's directory: its encoded state and its tensors."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        self.path = checkpoint.file(f"{name}/{STATE}")
        data = read_file(self.path)
        if checkpoint.manifest.files[f"{name}/{STATE}"].crc32 != crc32_text(zlib.crc32(data)):
            raise CheckpointError(f"{self.path} is damaged, or of another save: {MANIFEST} has another checksum")
        top = loads(data, self.path, halves=True)
        check_format(top, self.path)
        self._check_save(top.get("save_id"), top.get("rank"), self.path)
        try:
            self.tree: Any = top["state"]
            self._records: dict[str, dict[str, Any]] = top["tensors"]
        except KeyError as e:
            raise CheckpointError(f"{self.path} is damaged: no {e}") from e
        try:  # here, where the file is known
            decode(self.tree, lambda leaf: None)
            entries(self.tree)
        except CheckpointError as e:
            raise CheckpointError(f"{self.path}: {e}") from e
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

    def tensor(self, file: str, name: str) -> tuple[FileTensor, Cut]:
        held = self._records.get(file) if isinstance(self._records, dict) else None
        if isinstance(held, dict) and name not in held:
            raise CheckpointError(f"{self.path} has no tensor {name!r} of {file}")
        try:
            record = self._records[file][name]
            dtype, shape = dtype_of(record["dtype"]), tuple(int(s) for s in record["shape"])
            cut: Cut = record["spec"]
            if isinstance(cut, dict):
                # version 1 does not record the axis, which is always tp
                cut = Layout.of(ShardSpec.from_json(cut), *record.get("axes", ("tp",)))
            crc32 = str(record["crc32"])
        except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as e:
            raise CheckpointError(f"{self.path}: the record of {name!r} in {file} is damaged: {e!r}") from e
        return self._open(file).recorded(name, dtype, shape, crc32), cut
