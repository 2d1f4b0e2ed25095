"""The last of several checkpoints whose names end in numbers, and which make way for it."""

from __future__ import annotations

import os
import re
import shutil

from ...errors import CheckpointError
from ...storage.files import MANIFEST, loads, naming, read_file, sync_dir
from ...storage.publish import replaced_names, resolve
from .manifest import FORMAT

_LEAVING = ".removing"
_NUMBERED = re.compile(r"(.*?)(\d+)")


def newest(parent: str) -> str | None:
    """Path of the complete checkpoint in ``parent`` whose name ends in the highest number, if any."""
    if not os.path.isdir(parent):
        return None
    with naming("list", parent):
        names = {*os.listdir(parent), *replaced_names(parent)}
    numbered = [(int(match[2]), name) for name in names if (match := _NUMBERED.fullmatch(name))]
    for _, name in sorted(numbered, reverse=True):
        path = os.path.join(parent, name)
        if not name.startswith(".") and _is_checkpoint(os.path.join(resolve(path), MANIFEST)):
            return path
    return None


def _is_checkpoint(manifest: str) -> bool:
    """And neither a directory of something else nor a traced model."""
    if not os.path.isfile(manifest):
        return False
    try:
        top = loads(read_file(manifest), manifest)
    except CheckpointError:
        return False
    return isinstance(top, dict) and top.get("format") == FORMAT


def keep_last(target: str, n: int) -> None:
    """Of the checkpoints beside ``target`` called like it but for the number at the end, keep the last ``n``.

    Those with higher numbers than ``target`` are not touched: they are of a run that went further. A name
    without a number has no older ones.
    """
    parent, name = os.path.split(target)
    mine = _NUMBERED.fullmatch(name)
    if mine is None:
        return
    older = []
    with naming("list", parent):
        names = os.listdir(parent)
    for other in names:
        if other.startswith(f".{mine[1]}") and other.endswith(_LEAVING):
            shutil.rmtree(os.path.join(parent, other), ignore_errors=True)  # of a save that was killed
        match = _NUMBERED.fullmatch(other)
        if match is None or match[1] != mine[1] or int(match[2]) >= int(mine[2]):
            continue
        path = os.path.join(parent, other)
        if os.path.isfile(os.path.join(path, MANIFEST)) and not os.path.islink(path):
            older.append((int(match[2]), path))
    for _, path in sorted(older, reverse=True)[n - 1 :]:
        # under a name that no reader takes for a checkpoint, for the time that removing it takes
        leaving = os.path.join(parent, f".{os.path.basename(path)}{_LEAVING}")
        with naming("remove", path):
            os.rename(path, leaving)
            sync_dir(parent)
            shutil.rmtree(leaving, ignore_errors=True)
