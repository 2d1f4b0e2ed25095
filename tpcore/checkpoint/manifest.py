"""The manifest of a checkpoint, the names of its files, and the open directories of its ranks."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from ..layout.layout import Layout
from ..layout.shard import ShardSpec
from .storage.files import MANIFEST, PREFIX, FileRecord, crc32_text, damage, dumps, loads, naming, read_file, sync_dir
from .storage.publish import format_of, resolve
from .storage.tensorfile import FileTensor, TensorFile, dtype_of
from .stored import Cut
from .tree import Leaf, decode

FORMAT = "tpcore.checkpoint"
VERSION = 2
"""Version 1 records no axes: every cut is over tp. It can still be read."""
READABLE = (1, VERSION)
STATE = "state.json"

_FILE = re.compile(r"tp_rank_\d+(_pp_rank_\d+)?/[A-Za-z0-9_][A-Za-z0-9_.-]*")


def rank_dir(tp_rank: int, pp_rank: int = 0, pp: int = 1) -> str:
    """Name of a rank's directory. It contains the pp rank only if there are several stages."""
    return f"{PREFIX}{tp_rank}" + (f"_pp_rank_{pp_rank}" if pp > 1 else "")


@dataclass(frozen=True)
class Manifest:
    """Lists the files of a save. Keys of ``files``: paths in the checkpoint, with forward slashes."""

    save_id: str
    mesh: Mapping[str, int]
    files: Mapping[str, FileRecord]
    written_by: Mapping[str, str]

    @property
    def degrees(self) -> tuple[int, int]:
        return self.mesh.get("tp", 1), self.mesh.get("pp", 1)

    @property
    def rank_dirs(self) -> list[str]:
        tp, pp = self.degrees
        return [rank_dir(t, p, pp) for t in range(tp) for p in range(pp)]

    def to_json(self) -> bytes:
        files = {p: {"bytes": f.size, "crc32": f.crc32} for p, f in sorted(self.files.items())}
        top = {"format": FORMAT, "version": VERSION, "save_id": self.save_id, "mesh": dict(self.mesh)}
        return dumps(top | {"written_by": dict(self.written_by), "files": files}, indent=1)

    @classmethod
    def from_json(cls, data: bytes, path: str) -> Manifest:
        """Parse a manifest. CheckpointError, naming ``path``, for anything but one of a readable version."""
        top = loads(data, path)
        check_format(top, path)
        with damage(path):
            mesh = {axis: typed(int, size) for axis, size in top["mesh"].items()}
            files = {n: FileRecord(typed(int, f["bytes"]), typed(str, f["crc32"])) for n, f in top["files"].items()}
            manifest = cls(typed(str, top["save_id"]), mesh, files, dict(top["written_by"]))
        manifest.check(path)
        return manifest

    def check(self, path: str) -> None:
        """CheckpointError if the directories of the files are not those of the mesh."""
        tp, pp = self.degrees
        if any(size < 1 for size in self.mesh.values()):
            raise CheckpointError(f"{path} is damaged: mesh {dict(self.mesh)}")
        for name in self.files:
            if not _FILE.fullmatch(name):
                raise CheckpointError(f"{path} lists {name!r}, which is no file of a rank's directory")
        dirs = {name.partition("/")[0] for name in self.files}
        # compare the number first: the names for a damaged mesh of 10**8 ranks would take all memory
        if len(dirs) != tp * pp or dirs != set(self.rank_dirs):
            shown = f"{sorted(dirs)[:8]}" + (f" and {len(dirs) - 8} more" if len(dirs) > 8 else "")
            raise CheckpointError(
                f"{path} lists files of {shown}, but its mesh {dict(self.mesh)} has {tp} tp ranks in {pp} stages each"
            )


def typed(kind: type, value: Any) -> Any:
    """``value``. TypeError if it is of another type; a bool is no int."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r} where {kind} belongs")
    return value


def check_format(top: Any, path: str) -> None:
    if not isinstance(top, dict) or top.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not of a checkpoint of the format {FORMAT!r}")
    if top.get("version") not in READABLE:
        raise CheckpointError(
            f"{path} is of format version {top.get('version')!r} and this tpcore reads versions {READABLE[0]} to "
            f"{VERSION}: use the tpcore that wrote it, or a newer one"
        )


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
        self.tp, self.pp = self.manifest.degrees
        self._ranks: dict[tuple[int, int], RankState] = {}

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
        self._files: dict[str, TensorFile] = {}
        data = read_file(self.path)
        if checkpoint.manifest.files[f"{name}/{STATE}"].crc32 != crc32_text(zlib.crc32(data)):
            raise CheckpointError(f"{self.path} is damaged, or of another save: {MANIFEST} has another checksum")
        top = loads(data, self.path, halves=True)
        check_format(top, self.path)
        self._check_save(top.get("save_id"), top.get("rank"), self.path)
        with damage(self.path):
            tree, self._records = top["state"], top["tensors"]
        try:  # here, where the file is known
            self.state = decode(tree)
        except CheckpointError as e:
            raise CheckpointError(f"{self.path}: {e}") from e
        if not isinstance(self.state, dict):
            raise CheckpointError(f"{self.path}: a dict is missing where a checkpoint has one")

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

    def tensor(self, leaf: Leaf) -> tuple[FileTensor, Cut]:
        file, name = leaf.file, leaf.name
        with damage(f"{self.path}: the record of {name!r} in {file}"):
            record = self._records[file].get(name)
            if record is None:
                raise CheckpointError(f"{self.path} has no tensor {name!r} of {file}")
            dtype, shape, crc32 = dtype_of(record["dtype"]), tuple(map(int, record["shape"])), str(record["crc32"])
            cut: Cut = record["spec"]
            if isinstance(cut, dict):
                # version 1 does not record the axis, which is always tp
                cut = Layout.of(ShardSpec.from_json(cut), *record.get("axes", ("tp",)))
        return self._open(file).recorded(name, dtype, shape, crc32), cut


_NUMBERED = re.compile(r"(.*?)(\d+)")


def newest(parent: str) -> str | None:
    """Path of the complete checkpoint in ``parent`` whose name ends in the highest number, if any."""
    if not os.path.isdir(parent):
        return None
    with naming("list", parent):
        names = os.listdir(parent)
    for _, name in _numbered(names):
        path = os.path.join(parent, name)
        if not name.startswith(".") and _is_checkpoint(resolve(path)):
            return path
    return None


def _numbered(names: Iterable[str], stem: str | None = None) -> list[tuple[int, str]]:
    """The ``names`` that end in a number, after ``stem`` if it is given, by number, the highest first."""
    matches = [match for match in map(_NUMBERED.fullmatch, names) if match and stem in (None, match[1])]
    return sorted(((int(match[2]), match[0]) for match in matches), reverse=True)


def _is_checkpoint(folder: str) -> bool:
    """Whether ``folder`` has a manifest, and not one of a traced model for example. Of what another version of tpcore
    wrote, and of what is damaged further on, loading says so: an older checkpoint is not taken in its place."""
    with suppress(CheckpointError):
        return format_of(folder) == FORMAT
    return False


def keep_last(target: str, n: int) -> None:
    """Keep ``target`` and the ``n - 1`` checkpoints before it, and remove older ones, whose names differ only in the
    number at the end. Those with higher numbers, from a run that went further, and directories of other programs stay.
    """
    parent, name = os.path.split(target)
    mine = _NUMBERED.fullmatch(name)
    if mine is None:
        return
    with naming("list", parent):
        names = os.listdir(parent)
    paths = [os.path.join(parent, other) for i, other in _numbered(names, mine[1]) if i < int(mine[2])]
    older = [p for p in paths if not os.path.islink(p) and _is_checkpoint(p)]
    for path in older[n - 1 :]:
        # renamed first, so that no reader takes the half-removed directory for a checkpoint: to a name that the next
        # save removes
        removing = os.path.join(parent, f".{os.path.basename(path)}.replaced-removed")
        with naming("remove", path):
            os.rename(path, removing)
            sync_dir(parent)
            shutil.rmtree(removing, ignore_errors=True)
