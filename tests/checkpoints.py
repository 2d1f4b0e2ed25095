"""What tests of checkpoints share: the values in one, and changes to its files that its sums follow."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.read.source import CutRule, opened, part, tensors_of


def values(path: Path, rules: Sequence[CutRule] = (), tp: int | None = None, **how: Any) -> dict[str, Tensor]:
    """The unsharded tensors of the model in a checkpoint of any form, which is of ``tp`` ranks."""
    with opened(path, Reading(**how), rules) as source:
        assert tp in (None, source.tp)
        return {name: part(stored, 0, 1) for name, stored in tensors_of(source, rules).items()}


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a file of JSON. What changes puts as "1e400" is infinite in the file."""
    top = json.loads(path.read_text())
    change(top)
    path.write_text(json.dumps(top).replace('"1e400"', "1e400"))


def refit(folder: Path, name: str, change: Callable[[Any], object] | None = None) -> None:
    """Put the size and sum of a file on record, as they are now, after ``change`` of its JSON."""
    if change is not None:
        edit(folder / name, change)
    if name != "manifest.json":
        data = (folder / name).read_bytes()
        record = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        edit(folder / "manifest.json", lambda top: top["files"].update({name: record}))


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file in it, but for locks."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in files.items() if not name.endswith(".lock")}
