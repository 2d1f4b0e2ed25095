"""Shards in one file per rank, without recorded cuts; of NeuronX Distributed, in all its layouts, pickles."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import nested
from ...errors import CheckpointError, counted
from ...layout.shard import Block, ShardSpec
from ..manifest import STATE
from ..storage.files import naming
from ..stored import MemoryShard, Stored
from .pickles import differing, in_own_memory, mapped, parted, top_of, unpickled
from .source import Fill, Reading, Source, SpecOf, Stage, State, inside

Entries = dict[Any, Any]
"""The entries other than the model in one rank's file."""


class Original(NamedTuple):
    """A tensor of the original model, in equal pieces along ``dim``, in order."""

    name: str
    dim: int
    pieces: Sequence[Tensor]


class RankFiles(Source):
    """``files[pp_rank][tp_rank]``: the path of a rank's file. A subclass reads one file."""

    def __init__(self, path: str, files: Sequence[Sequence[str]], how: Reading) -> None:
        self.path, self.files, self.how = path, files, how
        self.pp, self.tp = len(files), len(files[0])
        self.contents = cache(self.read)  # each rank's stage asks for those of all ranks

    @abstractmethod
    def read(self, file: str) -> tuple[Mapping[str, Any], Entries]:
        """The model's state and the other entries of a file, as ``pickles.parted`` returns them."""

    def spec(self, name: str, shape: tuple[int, ...], pp_rank: int) -> ShardSpec | None:
        """The recorded cut of a tensor, for readers that do not know it; None if not recorded."""
        return None

    def originals(self, states: Sequence[Mapping[str, Any]], pp_rank: int) -> tuple[list[Original], set[str]]:
        """Tensors that are stored only fused or reordered, and the stored names that they come from."""
        return [], set()

    def stage(self, pp_rank: int, tp_rank: int | None, spec_of: SpecOf) -> Stage:
        return _RankFilesStage(self, pp_rank, tp_rank, spec_of)

    def entries_of_all(self, spec_of: SpecOf, names: Sequence[str] | None = None) -> Stage:
        return _RankFilesStage(self, 0, None, spec_of, [file for stage in self.files[1:] for file in stage])


class _RankFilesStage(Stage):
    """``alike``: files of other stages, whose entries other than the model this stage represents too."""

    def __init__(
        self, source: RankFiles, pp_rank: int, tp_rank: int | None, spec_of: SpecOf, alike: Sequence[str] = ()
    ) -> None:
        self._source, self._pp_rank, self._tp_rank, self._spec_of = source, pp_rank, tp_rank, spec_of
        self._files = source.files[pp_rank]
        read = [source.contents(file) for file in self._files]
        self._states = [state for state, _ in read]
        rests = [rest for _, rest in read] + [source.contents(file)[1] for file in alike]
        self._rest, self._bound = rests[tp_rank or 0], differing(rests) if tp_rank is None else []

    def states(self) -> Sequence[Mapping[str, Any]]:
        return self._states

    def model(self, fill: Fill | None = None) -> State:
        first = self._states[self._tp_rank or 0]
        for file, state in zip(self._files, self._states, strict=True):
            for name in sorted(state.keys() ^ first.keys()):
                raise CheckpointError(f"{file} and {self._files[self._tp_rank or 0]} do not both have {name!r}")
        model: State = {}
        originals, used = self._source.originals(self._states, self._pp_rank)
        for name, dim, pieces in originals:
            shards = [mapped(piece, name, self._source.path) for piece in pieces]
            spec = even_spec(shards[0].shape, len(shards), dim)
            model[name] = Stored.over_tp(name, spec, len(shards), None, shards.__getitem__)
        for name, value in first.items():
            if isinstance(value, Stored):  # of an unsharded file: a cut that does not fit is no cut of this tensor
                known = self._spec_of(name, value.shape, 1)
                fits = known is not None and known.local_shape(1) == value.shape
                model[name] = Stored.over_tp(name, known, 1, None, value.shard) if fits else value
            elif name not in used:
                model[name] = self._stored(name) if isinstance(value, Tensor) else value
        return model

    def _stored(self, name: str) -> Stored:
        pairs = zip(self._states, self._files, strict=True)
        shards, where = [mapped(s[name], name, file) for s, file in pairs], self._source.path
        if len({(s.shape, s.dtype) for s in shards}) > 1:
            raise CheckpointError(f"{where}: {name!r} has another shape or dtype on another rank")
        shape, tp = shards[0].shape, len(shards)
        known, said = self._spec_of(name, shape, tp), self._source.spec(name, shape, self._pp_rank)
        if known is not None and said is not None and len(said.blocks) > 1 and said != known:
            raise CheckpointError(
                f"{where}: {name!r} is stored as {said}, and the model or --cut has it as {known}: "
                "make the layer with the blocks of the file"
            )
        spec = known or said
        if spec is not None and spec.local_shape(tp) != shape:
            raise CheckpointError(
                f"{where}: {name!r} has shape {shape} on each of {tp} ranks, "
                f"but {spec} is cut to {spec.local_shape(tp)}"
            )
        if spec is not None and spec.dim is not None:
            shards = in_order(shards, spec, f"{where}: {name!r}")
        return Stored.over_tp(name, spec, tp, self._tp_rank, shards.__getitem__)

    def entries(self, fill: Fill, without: Collection[Any] = (), *, model: bool = False) -> Any:
        rest = {key: in_own_memory(value) for key, value in self._rest.items() if key not in without}
        if not model:
            return rest
        items = self.model().items()
        state = {name: fill(item) if isinstance(item, Stored) else in_own_memory(item) for name, item in items}
        return {self._source.how.model_key: state, **rest}

    def bound(self, *, model: bool = False) -> Mapping[Any, str]:
        why = (
            f"{', '.join(map(str, self._bound))} in {self._source.path} can be loaded only at the degree of the save, "
            f"tp={self._source.tp}: it differs between ranks or is an optimizer's state, whose parameters the file "
            "does not name. For an optimizer's state: load(path, optimizer, model_key=...)"
        )
        return dict.fromkeys(self._bound, why)


def grid(root: str, files: Mapping[tuple[int, int], str]) -> list[list[str]]:
    """``files`` by pp and tp rank as ``[pp_rank][tp_rank]``. CheckpointError if one is missing."""
    pp, tp = (1 + max(at[i] for at in files) for i in (0, 1))
    if pp * tp > 1 << 16:
        raise CheckpointError(f"{root} names rank {max(files)}: most ranks before it are missing")
    for at in ((p, t) for p in range(pp) for t in range(tp)):
        if at not in files:
            raise CheckpointError(
                f"{root} holds {counted(len(files), 'rank')}, but not tp rank {at[1]} of pp rank {at[0]}"
            )
    return [[files[p, t] for t in range(tp)] for p in range(pp)]


def even_spec(shape: tuple[int, ...], tp: int, dim: int, stride: int = 1) -> ShardSpec:
    """The cut into ``tp`` shards of ``shape``: ``stride`` blocks of equal size, no padding."""
    if not 0 <= dim < len(shape) or shape[dim] % stride:
        raise CheckpointError(f"a shard of shape {shape} is not one of {stride} blocks along dim {dim}")
    full = shape[dim] * tp
    return ShardSpec((*shape[:dim], full, *shape[dim + 1 :]), dim, (Block(full // stride),) * stride)


def in_order(shards: list[MemoryShard], spec: ShardSpec, where: str) -> list[MemoryShard]:
    """The shards with copies side by side, ``a a b b``; some libraries write ``a b a b``, and the values tell."""
    if _replicas_agree(shards, spec):
        return shards
    if len(spec.blocks) == 1:
        units = -(-spec.blocks[0].size // spec.blocks[0].unit)
        moved = [shard for unit in range(units) for shard in shards[unit::units]]
        if _replicas_agree(moved, spec):
            return moved
    raise CheckpointError(f"{where}: ranks that should hold copies of the same heads hold different values")


def _replicas_agree(shards: list[MemoryShard], spec: ShardSpec) -> bool:
    first_of: dict[tuple[int, int], Tensor] = {}
    for rank, shard in enumerate(shards):
        for piece in spec.pieces(rank, len(shards)):
            t = shard.tensor.narrow(spec.dim or 0, piece.local, piece.length)
            first = first_of.setdefault((piece.full, piece.length), t)
            if first is not t and not torch.equal(first, t):
                return False
    return True


# -- the pickles of NeuronX Distributed ---------------------------------------------------------------------
_RANK = re.compile(r"(?:dp_rank_(\d+)_)?tp_rank_(\d+)(?:_pp_rank_(\d+))?(\.pt)?")
_FOLDERS = ("", "model", "shards", "shards/model", "tensor_parallel_shards", "tensor_parallel_shards/model")


class TensorReference:
    """Placeholder in files of torch_xla's serialization for a tensor in ``<file>.tensors/``."""

    tid: int


# the only classes that a reference file may name in addition to those of tensors; neither is imported
_REFERENCES = [
    type("TensorReference", (TensorReference,), {"__module__": f"{library}.utils.serialization"})
    for library in ("torch_xla", "neuronx_distributed")
]


class PickledShards(RankFiles):
    form = "pickled shards"

    def read(self, file: str) -> tuple[Mapping[str, Any], Entries]:
        pickled = top_of(file, self.how, _REFERENCES)
        top = nested.mapped(lambda reference: _resolved(reference, file, self.how), pickled, TensorReference)
        return parted({key: value for key, value in top.items() if key != "tp_rank"}, self.how, file)


def find(path: str) -> tuple[str, list[list[str]]] | None:
    """The folder of shards (``path`` or one inside it) and the files of each stage. None without shards."""
    for folder in _FOLDERS if os.path.isdir(path) else ():
        root = os.path.join(path, folder) if folder else path
        if stages := _stages(root) if os.path.isdir(root) else None:
            return root, stages
    return None


def _stages(root: str) -> list[list[str]] | None:
    with naming("list", root):
        names = sorted(os.listdir(root))
    files: dict[tuple[int, int], str] = {}
    for match in filter(None, map(_RANK.fullmatch, names)):
        if int(match[1] or 0):
            continue  # all data-parallel ranks hold the same state
        path, at = os.path.join(root, match[0]), (int(match[3] or 0), int(match[2]))
        if os.path.isfile(os.path.join(path, STATE)):
            return None  # a tpcore checkpoint whose manifest is missing
        if at in files:
            raise CheckpointError(f"{path} and {files[at]} are of one rank")
        pickled = [match[0]]  # the file itself, or the one in a directory
        if os.path.isdir(path):
            pickled = [os.path.join(match[0], name) for name in sorted(os.listdir(path)) if name.endswith(".pt")]
        if len(pickled) != 1:
            raise CheckpointError(
                f"{path} holds {len(pickled)} .pt files where one rank's state belongs: {pickled[:4]}"
            )
        files[at] = inside(root, pickled[0], root)
    return grid(root, files) if files else None


def _resolved(reference: TensorReference, file: str, how: Reading) -> Tensor:
    tid = getattr(reference, "tid", None)
    if type(tid) is not int or tid < 0:
        raise CheckpointError(f"{file} is damaged: it refers to a tensor {tid!r}")
    path = inside(f"{file}.tensors", f"tensor_{tid}.pt", file)
    t = unpickled(path, replace(how, quiet=True))
    if not isinstance(t, Tensor):
        raise CheckpointError(f"{path} holds a {type(t).__name__}, not a tensor")
    return t
