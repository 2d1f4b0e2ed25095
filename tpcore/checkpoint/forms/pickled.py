"""Sharded checkpoints of NeuronX Distributed, in all its layouts: one pickle per rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...errors import CheckpointError
from ..format.manifest import STATE
from ..storage.files import naming
from .pickles import parted, top_of, unpickled
from .rank_files import RankFiles, grid
from .source import Form, Reading, Source, inside

_RANK = re.compile(r"(?:dp_rank_(\d+)_)?tp_rank_(\d+)(?:_pp_rank_(\d+))?(\.pt)?")
_FOLDERS = ("", "model", "shards", "shards/model", "tensor_parallel_shards", "tensor_parallel_shards/model")


class TensorReference:
    """Placeholder in files of torch_xla's serialization for a tensor in ``<file>.tensors/``."""

    tid: int


def _named(module: str) -> type:
    return type("TensorReference", (TensorReference,), {"__module__": module})


# the only classes that a reference file may name in addition to those of tensors; neither is imported
_REFERENCES = [_named(f"{m}.utils.serialization") for m in ("torch_xla", "neuronx_distributed")]


class PickledShards(RankFiles):
    form = "pickled shards"

    def read(self, file: str) -> tuple[Mapping[str, Any], dict[Any, Any]]:
        top = tree_map_only(
            TensorReference, lambda at: _resolved(at, file, self.how), top_of(file, self.how, _REFERENCES)
        )
        return parted({key: value for key, value in top.items() if key != "tp_rank"}, self.how, file)


def find(path: str) -> tuple[str, list[list[str]]] | None:
    """The folder of shards (``path`` or one inside it) and the files of each stage. None without shards."""
    for folder in _FOLDERS if os.path.isdir(path) else ():
        root = os.path.join(path, folder) if folder else path
        stages = _stages(root) if os.path.isdir(root) else None
        if stages:
            return root, stages
    return None


def _stages(root: str) -> list[list[str]] | None:
    with naming("list", root):
        names = sorted(os.listdir(root))
    found: dict[tuple[int, int], str] = {}
    for name in names:
        match = _RANK.fullmatch(name)
        if match is None or int(match[1] or 0):
            continue  # all data-parallel ranks hold the same state
        if os.path.isfile(os.path.join(root, name, STATE)):
            return None  # a tpcore checkpoint whose manifest is missing
        at = int(match[3] or 0), int(match[2])
        if at in found:
            raise CheckpointError(f"{os.path.join(root, name)} and {found[at]} are of one rank")
        found[at] = _file_of(root, name)
    return grid(root, found) if found else None


def _file_of(root: str, name: str) -> str:
    """The pickle of a rank: ``name`` itself, or the one file in that directory."""
    path = os.path.join(root, name)
    if not os.path.isdir(path):
        return inside(root, name, root)
    held = sorted(f for f in os.listdir(path) if f.endswith(".pt"))
    if len(held) != 1:
        raise CheckpointError(f"{path} holds {len(held)} .pt files where one rank's state belongs: {held[:4]}")
    return inside(root, os.path.join(name, held[0]), root)


def _resolved(reference: TensorReference, file: str, how: Reading) -> Tensor:
    """The mapped tensor that a reference stands for."""
    tid = getattr(reference, "tid", None)
    if type(tid) is not int or tid < 0:
        raise CheckpointError(f"{file} is damaged: it refers to a tensor {tid!r}")
    root = f"{file}.tensors"
    t = unpickled(inside(root, f"tensor_{tid}.pt", file), Reading(how.model_key, how.trust, quiet=True))
    if not isinstance(t, Tensor):
        raise CheckpointError(f"{root}/tensor_{tid}.pt holds a {type(t).__name__}, not a tensor")
    return t


def _open(path: str, how: Reading, stack: ExitStack) -> Source | None:
    found = find(path)
    return None if found is None else PickledShards(path, found[1], how)


FORM = Form(sharded=True, open=_open)
