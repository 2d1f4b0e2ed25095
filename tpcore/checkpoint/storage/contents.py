"""What a checkpoint owns in a directory, which may hold other files too."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from ...errors import CheckpointError
from .files import CANNOT, MANIFEST, PREFIX, loads, naming, read_file, sync_dir

_CANNOT_LINK = {*CANNOT, errno.EPERM, errno.EMLINK, errno.EXDEV}


def _is_owned(name: str, also: Collection[str]) -> bool:
    return name == MANIFEST or name in also or name.startswith(PREFIX)


def owned(folder: str, also: Collection[str]) -> list[str]:
    """What a checkpoint has put into ``folder``, its manifest last. ``also``: names besides those of ranks."""
    names = [n for n in sorted(os.listdir(folder)) if _is_owned(n, also)]
    return sorted(names, key=MANIFEST.__eq__)


def remove_owned(folder: str, also: Collection[str]) -> None:
    for name in reversed(owned(folder, also)):
        path = os.path.join(folder, name)
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def link_in(source: str, target: str, also: Collection[str]) -> None:
    """Replace the checkpoint in ``target`` by links to the files of ``source``, its manifest last."""
    remove_owned(target, also)
    for name in owned(source, also):
        link(os.path.join(source, name), os.path.join(target, name))
        sync_dir(target)


def link(source: str, target: str) -> None:
    """Hard links to all files of ``source``; copies on a file system without hard links."""
    if os.path.isdir(source):
        shutil.copytree(source, target, copy_function=link)
        sync_dir(target)
        return
    try:
        os.link(source, target)
    except OSError as e:
        if e.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, target)
        with open(target, "rb") as f:
            os.fsync(f.fileno())


def refuse_inside(target: str) -> None:
    """CheckpointError if ``target`` is in a directory that belongs to a checkpoint."""
    for here in (Path(target), *Path(target).parents):
        if here.name.startswith(PREFIX) and os.path.lexists(here.parent / MANIFEST):
            raise CheckpointError(
                f"cannot save to {target}: it is inside of the checkpoint {here.parent}, in its {here.name}, which the "
                "next save there replaces; give a directory outside of it"
            )


def refuse_other_files(target: str, format: str, also: Collection[str], others_stay: bool) -> None:
    """CheckpointError if saving would remove files of ``target`` that are not from a checkpoint."""
    if not os.path.lexists(target):
        return
    with naming("list", target):
        names = sorted(os.listdir(target))
    mine = [name for name in names if _is_owned(name, also)]
    wrong = [] if others_stay else [name for name in names if name not in mine]
    if MANIFEST in names:
        _refuse_other_format(target, format)
    else:
        wrong += mine
    if wrong:
        raise CheckpointError(
            f"cannot save to {target}: saving would replace the directory, and it holds {wrong[0]!r}"
            + (f" and {len(wrong) - 1} more" if wrong[1:] else "")
            + ", not from a checkpoint of this format; give another name, or a new directory inside it"
        )


def _refuse_other_format(target: str, format: str) -> None:
    path = os.path.join(target, MANIFEST)
    try:
        top = loads(read_file(path), path)
    except CheckpointError as e:
        raise CheckpointError(f"cannot save to {target}: {e}; give another name, or remove it") from e
    found = top.get("format") if isinstance(top, dict) else None
    if found != format:
        raise CheckpointError(
            f"cannot save to {target}: {path} is of the format {found!r}, and saving would replace the "
            f"directory by one of the format {format!r}: give another name"
        )
