"""The manifest of a checkpoint and the names of its files; the checkpoints of a directory, by number."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import CheckpointError
from .storage.files import PREFIX, FileRecord, damage, dumps, format_of, loads, naming, sync_dir
from .storage.publish import resolve

FORMAT = "tpcore.checkpoint"
VERSION = 2
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

    @cached_property
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
    if top.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of format version {top.get('version')!r} and this tpcore reads version {VERSION}: use the "
            "tpcore that wrote it, or a newer one"
        )


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
    numbered = _NUMBERED.fullmatch(name)
    if numbered is None:
        return
    with naming("list", parent):
        names = os.listdir(parent)
    paths = [os.path.join(parent, other) for i, other in _numbered(names, numbered[1]) if i < int(numbered[2])]
    older = [p for p in paths if not os.path.islink(p) and _is_checkpoint(p)]
    for path in older[n - 1 :]:
        # renamed first, so that no reader takes the half-removed directory for a checkpoint: to a name that the next
        # save removes
        removing = os.path.join(parent, f".{os.path.basename(path)}.replaced-removed")
        with naming("remove", path):
            os.rename(path, removing)
            sync_dir(parent)
            shutil.rmtree(removing, ignore_errors=True)
