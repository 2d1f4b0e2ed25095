"""The last of several checkpoints whose names end in numbers, and which make way for it."""

from __future__ import annotations

import os
import re
import shutil

from ...errors import CheckpointError
from ..storage.files import MANIFEST, loads, naming, read_file, sync_dir
from ..storage.publish import replaced_names, resolve
from .manifest import FORMAT

_REMOVING = ".removing"
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
    """Whether the file ``manifest`` exists and is of a checkpoint, not of a traced model for example."""
    if not os.path.isfile(manifest):
        return False
    try:
        top = loads(read_file(manifest), manifest)
    except CheckpointError:
        return False
    return isinstance(top, dict) and top.get("format") == FORMAT


def keep_last(target: str, n: int) -> None:
    """Keep ``target`` and the ``n - 1`` checkpoints before it, and remove older ones. Traced models and
    directories of other programs stay.

    Their names differ from ``target`` only in the number at the end. Checkpoints with higher numbers are not
    touched, because they are from a run that went further. A name without a number has no older checkpoints.
    """
    parent, name = os.path.split(target)
    mine = _NUMBERED.fullmatch(name)
    if mine is None:
        return
    older = []
    with naming("list", parent):
        names = os.listdir(parent)
    for other in names:
        if other.startswith(f".{mine[1]}") and other.endswith(_REMOVING):
            shutil.rmtree(os.path.join(parent, other), ignore_errors=True)  # from a killed save
        match = _NUMBERED.fullmatch(other)
        if match is None or match[1] != mine[1] or int(match[2]) >= int(mine[2]):
            continue
        path = os.path.join(parent, other)
        if not os.path.islink(path) and _is_checkpoint(os.path.join(path, MANIFEST)):
            older.append((int(match[2]), path))
    for _, path in sorted(older, reverse=True)[n - 1 :]:
        # renamed first, so that no reader takes the half-removed directory for a checkpoint
        removing = os.path.join(parent, f".{os.path.basename(path)}{_REMOVING}")
        with naming("remove", path):
            os.rename(path, removing)
            sync_dir(parent)
            shutil.rmtree(removing, ignore_errors=True)
