"""Checks that files named by a checkpoint are in its directory."""

from __future__ import annotations

import os

from ...errors import CheckpointError


def inside(root: str, name: str, index: str) -> str:
    """Path of file ``name`` in ``root``. CheckpointError if it is missing or outside. ``index``: names it."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise CheckpointError(f"{index} names {name!r}, which is not a file in {root}")
    path = os.path.join(root, name)
    if not os.path.realpath(path).startswith(os.path.realpath(root) + os.sep) and not _snapshot(root, path):
        raise CheckpointError(f"{path} is a link out of {root}")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}, which {index} names, is missing")
    return path


def _snapshot(root: str, path: str) -> bool:
    """Whether a link is one of Hugging Face's download cache, from a snapshot to ``../../blobs/<hash>``."""
    parent, _, _ = os.path.realpath(root).rpartition(f"{os.sep}snapshots{os.sep}")
    return bool(parent) and os.path.dirname(os.path.realpath(path)) == os.path.join(parent, "blobs")
