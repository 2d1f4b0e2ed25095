"""Which older checkpoints make way for a new one."""

from __future__ import annotations

import os
import re
import shutil

from ...storage.files import MANIFEST, naming, sync_dir

_LEAVING = ".removing"
_NUMBERED = re.compile(r"(.*?)(\d+)")


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
