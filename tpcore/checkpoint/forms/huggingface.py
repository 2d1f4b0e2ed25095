"""A Hugging Face directory: one file of weights, or several and an index of which tensor is in which."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from ...storage.files import read_file
from ...storage.jsonfile import loads

INDEX = ".index.json"
_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which they are preferred


def weight_files(path: str) -> dict[str, set[str] | None] | None:
    """Path of each file of weights, with the names to take from it (None: all); None if there are none.

    Raises CheckpointError for an index that names files outside of the directory or that are missing.
    """
    for name in _FILES:
        index = os.path.join(path, name + INDEX)
        if os.path.lexists(index):
            return _indexed(path, index)
        if os.path.lexists(os.path.join(path, name)):
            return {inside(path, name, path): None}
    return None


def _indexed(path: str, index: str) -> dict[str, set[str] | None]:
    top = loads(read_file(index), index)
    weight_map = top.get("weight_map") if isinstance(top, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index} is damaged: it has no weight_map from names to files")
    found: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        names = found.setdefault(inside(path, file, index), set())
        if names is not None:
            names.add(name)
    return found


def inside(root: str, name: str, said_by: str) -> str:
    """Path of a file of ``root`` by the name that a file there gives it, which may be no way out of it."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise CheckpointError(f"{said_by} names {name!r}, which is not a file in {root}")
    path = os.path.join(root, name)
    if not os.path.realpath(path).startswith(os.path.realpath(root) + os.sep) and not _snapshot(root, path):
        raise CheckpointError(f"{path} is a link out of {root}")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}, which {said_by} names, is missing")
    return path


def _snapshot(root: str, path: str) -> bool:
    """In the download cache a snapshot's files are links to ``../../blobs/<hash>``, and those are meant."""
    parent, _, _ = os.path.realpath(root).rpartition(f"{os.sep}snapshots{os.sep}")
    return bool(parent) and os.path.dirname(os.path.realpath(path)) == os.path.join(parent, "blobs")


def aligned(found: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """``found`` under the model's names, where those of one of the two only have one prefix more.

    A base model's weights are stored as ``bert.embeddings...`` in the file of a model with a head, and
    without ``bert.`` in its own.
    """
    if not wanted or not found or wanted & found.keys():
        return dict(found)
    shortest = min(wanted, key=lambda name: (len(name), name))
    for name in found:
        if name.endswith(f".{shortest}"):
            prefix = name[: -len(shortest)]
            if all(prefix + w in found for w in wanted):
                return {n.removeprefix(prefix): item for n, item in found.items()}
    first = min(found, key=lambda name: (len(name), name))
    for want in wanted:
        if want.endswith(f".{first}"):
            prefix = want[: -len(first)]
            if all(prefix + n in wanted for n in found):
                return {prefix + n: item for n, item in found.items()}
    return dict(found)
