"""The manifest of a checkpoint, and the names of its directories and files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..storage.files import PREFIX, FileRecord, dumps, loads

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

    def axis(self, name: str) -> int:
        return self.mesh.get(name, 1)

    @property
    def rank_dirs(self) -> list[str]:
        pp = self.axis("pp")
        return [rank_dir(t, p, pp) for t in range(self.axis("tp")) for p in range(pp)]

    def to_json(self) -> bytes:
        return dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "save_id": self.save_id,
                "mesh": dict(self.mesh),
                "written_by": dict(self.written_by),
                "files": {p: {"bytes": f.size, "crc32": f.crc32} for p, f in sorted(self.files.items())},
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, data: bytes, path: str) -> Manifest:
        """Parse a manifest. CheckpointError, naming ``path``, for anything but one of a readable version."""
        top = loads(data, path)
        check_format(top, path)
        try:
            manifest = cls(
                save_id=typed(str, top["save_id"]),
                mesh={typed(str, axis): typed(int, size) for axis, size in top["mesh"].items()},
                files={
                    typed(str, name): FileRecord(typed(int, f["bytes"]), typed(str, f["crc32"]))
                    for name, f in top["files"].items()
                },
                written_by=dict(top["written_by"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise CheckpointError(f"{path} is damaged: {type(e).__name__}: {e}") from e
        manifest.check(path)
        return manifest

    def check(self, path: str) -> None:
        """CheckpointError if the directories of the files are not those of the mesh."""
        if any(size < 1 for size in self.mesh.values()):
            raise CheckpointError(f"{path} is damaged: mesh {dict(self.mesh)}")
        for name in self.files:
            if not _FILE.fullmatch(name):
                raise CheckpointError(f"{path} lists {name!r}, which is no file of a rank's directory")
        dirs = {name.partition("/")[0] for name in self.files}
        # compare the number first: the names for a damaged mesh of 10**8 ranks would take all memory
        if len(dirs) != self.axis("tp") * self.axis("pp") or dirs != set(self.rank_dirs):
            shown = f"{sorted(dirs)[:8]}" + (f" and {len(dirs) - 8} more" if len(dirs) > 8 else "")
            raise CheckpointError(
                f"{path} lists files of {shown}, but its mesh {dict(self.mesh)} has "
                f"{self.axis('tp')} tp ranks in each of {self.axis('pp')} stages"
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
            f"{path} is of format version {top.get('version')!r} and this tpcore reads versions "
            f"{READABLE[0]} to {VERSION}: "
            "use the tpcore that wrote it, or a newer one"
        )
