"""An unsharded model: a file of safetensors or torch.save, or a Hugging Face directory of such files."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from ...errors import CheckpointError
from ...layout.shard import ShardSpec
from ..storage.files import loads, naming, read_file
from ..storage.tensorfile import TensorFile
from ..stored import Shard, Stored
from .pickles import mapped, parted, top_of
from .rank_files import Entries, RankFiles
from .source import Form, Reading, Source, State, inside


class Whole(RankFiles):
    """An unsharded model and the other entries, mapped. Opening it reads no parameter."""

    sharded = False

    def __init__(self, path: str, form: str, state: State, rest: Mapping[Any, Any]) -> None:
        super().__init__(path, [[path]], Reading())
        self.form, self._state, self._rest = form, state, rest

    def read(self, file: str) -> tuple[State, Entries]:
        return self._state, dict(self._rest)


def open_file(path: str, how: Reading, stack: ExitStack) -> tuple[State, Mapping[Any, Any]]:
    """The model in a file and the other entries of a torch file, mapped."""
    with naming("open", path), open(path, "rb") as f:
        magic = f.read(4)
    if path.endswith(".safetensors"):
        return _safetensors(path, stack), {}
    if magic == b"PK\x03\x04":
        state, rest = parted(top_of(path, how), how, path)
        return in_memory(state, path), rest
    if magic[:1] == b"\x80":
        raise CheckpointError(
            f"{path} has the form that torch wrote before 1.6, which cannot be read in part: "
            "write it anew, torch.save(torch.load(path, weights_only=True), path)"
        )
    raise CheckpointError(
        f"{path} is neither a .safetensors file nor one that torch.save has written: give one, or a checkpoint's folder"
    )


def _stored(where: str, shard: Shard) -> Stored:
    return Stored.over_tp(where, ShardSpec(shard.shape), 1, None, lambda _: shard)


def _safetensors(path: str, stack: ExitStack) -> State:
    file = TensorFile(path)
    stack.callback(file.close)
    state = {name: _stored(name, file.tensor(name)) for name in file.names()}
    # further names of tied weights, which safetensors.torch.save_model stores in the metadata
    return state | {other: state[name] for other, name in file.metadata.items() if other not in state and name in state}


def in_memory(state: Mapping[Any, Any], path: str) -> State:
    """An unsharded model's state of tensors that are in memory or mapped."""
    stored: State = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: a model's state has names, not {name!r}")
        stored[name] = _stored(name, mapped(value, name, path)) if isinstance(value, Tensor) else value
    return stored


INDEX = ".index.json"
_FILES = ("model.safetensors", "pytorch_model.bin")  # in order of preference


def _files_in(path: str) -> dict[str, set[str] | None]:
    """Paths of the files of weights, each with the names to take from it (None: all). One file counts before an index,
    as in transformers, whose ``save_pretrained`` leaves the index of an earlier save beside it."""
    for name in _FILES:
        index = os.path.join(path, name + INDEX)
        if os.path.lexists(os.path.join(path, name)):
            return {inside(path, name, path): None}
        if os.path.lexists(index):
            return _indexed(path, index)
    return {}


def _indexed(path: str, index: str) -> dict[str, set[str] | None]:
    top = loads(read_file(index), index)
    weight_map = top.get("weight_map") if isinstance(top, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index} is damaged: it has no weight_map from names to files")
    files: dict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        files[inside(path, file, index)].add(name)
    return {**files}


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    if os.path.isfile(path):
        return Whole(path, "unsharded file", *open_file(path, how, stack))
    files = _files_in(path)
    state: State = {}
    for file, names in files.items():
        tensors, _ = open_file(file, how, stack)
        if missing := sorted((names or set()) - tensors.keys()):
            raise CheckpointError(f"{file} has no {missing[0]!r}, which the index says it has")
        for name, item in tensors.items():  # a tied tensor is in the index under its stored name
            if names is None or (item.where if isinstance(item, Stored) else name) in names:
                state[name] = item
    return Whole(path, "unsharded directory", state, {}) if files else None


FORM = Form(sharded=False, open=_open)
