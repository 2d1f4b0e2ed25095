"""A Hugging Face directory: one file of weights, or several files and an index from tensor to file."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from ...errors import CheckpointError
from ..storage.files import loads, read_file
from ..tensors.stored import Stored
from .source import Form, Reading, Source, State, inside
from .whole import Whole, open_file

INDEX = ".index.json"
_FILES = ("model.safetensors", "pytorch_model.bin")  # in order of preference


def weight_files(path: str) -> dict[str, set[str] | None] | None:
    """Paths of the files of weights, each with the names to take from it (None: all). None without files.

    CheckpointError if the index names a file that is missing or outside of the directory.
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


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    files = weight_files(path) if os.path.isdir(path) else None
    if files is None:
        return None
    state: State = {}
    for file, names in files.items():
        found, _ = open_file(file, how, stack)
        missing = sorted((names or set()) - found.keys())
        if missing:
            raise CheckpointError(f"{file} has no {missing[0]!r}, which the index says it has")
        state.update((name, item) for name, item in found.items() if names is None or _listed(name, item, names))
    return Whole(path, "unsharded directory", state, {})


def _listed(name: str, item: Any, names: set[str]) -> bool:
    """Whether the index has this tensor. A tied tensor counts under its stored name."""
    return (item.where if isinstance(item, Stored) else name) in names


FORM = Form(sharded=False, open=_open)
