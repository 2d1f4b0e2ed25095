"""Sharded checkpoints of NeuronX Distributed and optimum-neuron: pickles that do not say how they are cut."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...context import ParallelContext
from ...errors import CheckpointError
from ...shard import Block, ShardSpec
from ...storage.files import naming
from ...storage.jsonfile import MANIFEST
from ..format.cuts import Cut, is_optimizer
from ..format.manifest import STATE
from ..format.stored import MemoryShard, Stored
from ..format.tree import is_nested
from .huggingface import inside
from .optimum import Attention, Fused, Recorded, recorded
from .whole import Reading, State, mapped, unpickled

Cuts = Callable[[str, tuple[int, ...], int], Cut]
"""How a tensor is cut, by name, shape of a shard and number of shards; None where all ranks hold the same."""

_RANK = re.compile(r"(?:dp_rank_(\d+)_)?tp_rank_(\d+)(?:_pp_rank_(\d+))?(\.pt)?")
_SHARDS = ("", "model", "shards", "shards/model", "tensor_parallel_shards", "tensor_parallel_shards/model")


class TensorReference:
    """Stands in a reference file of torch_xla's serialization for a tensor in ``<file>.tensors/``."""

    tid: int


def _named(module: str) -> type:
    return type("TensorReference", (TensorReference,), {"__module__": module})


# the only classes besides tensors' own that a reference file may name; neither is imported
_REFERENCES = [_named(f"{m}.utils.serialization") for m in ("torch_xla", "neuronx_distributed")]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """The files found, by pp rank: one for each tp rank."""

    path: str
    stages: list[list[str]]
    recorded: list[Recorded]  # of each stage, where there are metadata

    @property
    def tp(self) -> int:
        return len(self.stages[0])

    def open(
        self, how: Reading, cuts: Cuts, stage: int = 0, own_rank: int | None = None
    ) -> tuple[State, list[dict[Any, Any]]]:
        """One stage's model, and what lies beside it on each rank, still mapped.

        ``own_rank``: the rank whose shards are wanted as they are.
        """
        files = self.stages[stage]
        states, rests = self.read(how, stage)
        first = states[own_rank or 0]
        for file, state in zip(files, states, strict=True):
            for name in sorted(state.keys() ^ first.keys()):
                raise CheckpointError(f"{file} and {files[own_rank or 0]} do not both have {name!r}")
        found = self._originals(states, stage)
        used = {name for made in self._made(stage) for name in made.used()}
        for name, value in first.items():
            if name in used:
                continue
            if not isinstance(value, Tensor):
                found[name] = value
                continue
            shards = [mapped(s[name], name, f) for s, f in zip(states, files, strict=True)]
            if len({(s.shape, s.dtype) for s in shards}) > 1:
                raise CheckpointError(f"{self.path}: {name!r} has another shape or dtype on another rank")
            cut = self._cut(name, shards[0].shape, stage, cuts)
            if isinstance(cut, ShardSpec) and cut.dim is not None:
                shards = in_order(shards, cut, f"{self.path}: {name!r}")
            found[name] = Stored(name, cut, self.tp, own_rank, shards.__getitem__)
        return found, rests

    def read(self, how: Reading, stage: int) -> tuple[list[Mapping[str, Any]], list[dict[Any, Any]]]:
        """Of each rank: the entry ``how.model_key``, or all there is, and what lies beside it."""
        states, rests = zip(*(_read(f, how) for f in self.stages[stage]), strict=True)
        return list(states), list(rests)

    def stage_of(self, ctx: ParallelContext) -> int:
        """The stage of this rank."""
        pp_rank, pp = ctx.mesh.coords(ctx.rank).get("pp", 0), ctx.mesh.axes.get("pp", 1)
        if len(self.stages) != pp:
            raise CheckpointError(f"{self.path} has {len(self.stages)} pp stages and this job has pp={pp}")
        return pp_rank

    def _made(self, stage: int) -> Sequence[Fused | Attention]:
        return self.recorded[stage].made if self.recorded else ()

    def _originals(self, states: Sequence[Mapping[str, Any]], stage: int) -> State:
        """What the original model had in place of linears that were made one, or put in another order."""
        found: State = {}
        for made in self._made(stage):
            held = [name for name in made.used() if name not in states[0]]
            if held == made.used():
                continue  # not saved
            if held:
                raise CheckpointError(f"{self.stages[stage][0]} has no {held[0]!r}, which its metadata name")
            shards = {name: [state[name] for state in states] for name in made.used()}
            try:
                originals = list(made.originals(shards))
            except (ArithmeticError, IndexError, RuntimeError, ValueError) as e:
                why = f"{type(e).__name__}: {e}"
                raise CheckpointError(
                    f"{self.path}: {made.used()} are not as their metadata say: {why}"
                ) from e
            for name, dim, pieces in originals:
                parts = [mapped(piece, name, self.path) for piece in pieces]
                cut = even_cut(parts[0].shape, len(parts), dim)
                found[name] = Stored(name, cut, len(parts), None, parts.__getitem__)
        return found

    def _cut(self, name: str, shape: tuple[int, ...], stage: int, cuts: Cuts) -> Cut:
        cut = cuts(name, shape, self.tp)
        dim = self.recorded[stage].dims.get(name) if self.recorded else None
        if cut is None and dim is not None:
            cut = even_cut(shape, self.tp, dim)
        if isinstance(cut, ShardSpec) and cut.local_shape(self.tp) != shape:
            raise CheckpointError(
                f"{self.path}: {name!r} has shape {shape} on each of {self.tp} ranks, "
                f"but {cut} is cut to {cut.local_shape(self.tp)}"
            )
        return cut


def even_cut(shape: tuple[int, ...], tp: int, dim: int, stride: int = 1) -> ShardSpec:
    """The cut of which each of ``tp`` shards has ``shape``: ``stride`` blocks of one size, no padding."""
    if not 0 <= dim < len(shape) or shape[dim] % stride:
        raise CheckpointError(f"a shard of shape {shape} is not one of {stride} blocks along dim {dim}")
    full = shape[dim] * tp
    return ShardSpec((*shape[:dim], full, *shape[dim + 1 :]), dim, (Block(full // stride),) * stride)


def find(path: str) -> ForeignCheckpoint | None:
    """The checkpoint in ``path`` or in a folder of shards inside it; None if there is none of these forms."""
    for folder in _SHARDS:
        root = os.path.join(path, folder) if folder else path
        stages = _stages(root) if os.path.isdir(root) else None
        if stages:
            above = os.path.dirname(root) if os.path.basename(root) == "model" else root
            return ForeignCheckpoint(path, stages, recorded(above, len(stages)))
    return None


def recognised(path: str) -> ForeignCheckpoint | None:
    """``find``, but for what this library wrote."""
    ours = os.path.lexists(os.path.join(path, MANIFEST)) or not os.path.isdir(path)
    return None if ours else find(path)


def _stages(root: str) -> list[list[str]] | None:
    with naming("list", root):
        names = sorted(os.listdir(root))
    found: dict[tuple[int, int], str] = {}
    for name in names:
        match = _RANK.fullmatch(name)
        if match is None or int(match[1] or 0):
            continue  # data-parallel ranks hold the same
        if os.path.isfile(os.path.join(root, name, STATE)):
            return None  # of this library, whose manifest is missing
        at = int(match[3] or 0), int(match[2])
        if at in found:
            raise CheckpointError(f"{os.path.join(root, name)} and {found[at]} are of one rank")
        found[at] = _file_of(root, name)
    if not found:
        return None
    pp, tp = (1 + max(at[i] for at in found) for i in (0, 1))
    if pp * tp > 1 << 16:
        raise CheckpointError(f"{root} names rank {max(found)}: most ranks before it are missing")
    for at in ((p, t) for p in range(pp) for t in range(tp)):
        if at not in found:
            raise CheckpointError(
                f"{root} holds {len(found)} ranks, but not tp rank {at[1]} of pp rank {at[0]}"
            )
    return [[found[p, t] for t in range(tp)] for p in range(pp)]


def _file_of(root: str, name: str) -> str:
    """The pickle of a rank: a file itself, or the one in its directory."""
    path = os.path.join(root, name)
    if not os.path.isdir(path):
        return inside(root, name, root)
    held = sorted(f for f in os.listdir(path) if f.endswith(".pt"))
    if len(held) != 1:
        raise CheckpointError(
            f"{path} holds {len(held)} .pt files where one rank's state belongs: {held[:4]}"
        )
    return inside(root, os.path.join(name, held[0]), root)


def _read(file: str, how: Reading) -> tuple[Mapping[str, Any], dict[Any, Any]]:
    top = unpickled(file, how, _REFERENCES)
    if not isinstance(top, Mapping):
        raise CheckpointError(f"{file} holds a {type(top).__name__}, not a dict of tensors")
    top = _resolved(top, file, how)
    is_dict, is_tensor = partial(_is, Mapping), partial(_is, Tensor)
    nested = is_nested(top, how.model_key, file, is_dict, is_tensor)
    rest = {k: v for k, v in top.items() if k != "tp_rank" and not (nested and k == how.model_key)}
    return (top[how.model_key], rest) if nested else (rest, {})


def split(rests: Sequence[Mapping[Any, Any]]) -> tuple[dict[Any, Any], list[Any]]:
    """Of what lies beside the model on each rank: what is the same on all, and the keys of what is not.

    An optimizer's state is cut like its parameters even where all ranks hold zeros.
    """
    first, *others = rests
    bound = [
        key
        for key, value in first.items()
        if is_optimizer(value) or not all(key in rest and _same(value, rest[key]) for rest in others)
    ]
    return {key: value for key, value in first.items() if key not in bound}, bound


def why_bound(keys: Sequence[Any], path: str, tp: int) -> str:
    return (
        f"{', '.join(map(str, keys))} in {path} can be had only at the degree of the save, tp={tp}: it "
        "differs by rank or is an optimizer's state, and nothing there names the parameters that such a "
        "state belongs to. The optimizer knows: load(path, model_or_optimizer=optimizer, model_key=...)"
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype != b.dtype:
            return False
        return torch.equal(*(mapped(t, "a tensor beside the model", "a checkpoint").tensor for t in (a, b)))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def _resolved(value: Any, file: str, how: Reading) -> Any:
    """With tensors, mapped, in place of references to them."""
    if isinstance(value, TensorReference):
        tid = getattr(value, "tid", None)
        if type(tid) is not int or tid < 0:
            raise CheckpointError(f"{file} is damaged: it refers to a tensor {tid!r}")
        root = f"{file}.tensors"
        t = unpickled(inside(root, f"tensor_{tid}.pt", file), Reading(how.model_key, how.trust, quiet=True))
        if not isinstance(t, Tensor):
            raise CheckpointError(f"{root}/tensor_{tid}.pt holds a {type(t).__name__}, not a tensor")
        return t
    if isinstance(value, Mapping):
        return {key: _resolved(item, file, how) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_resolved(item, file, how) for item in value)
    return value


def in_order(shards: list[MemoryShard], cut: ShardSpec, where: str) -> list[MemoryShard]:
    """The shards such that neighbours hold one unit of replicated blocks, as ShardSpec has it.

    Some write the copies of ``a b`` as ``a b a b`` and not as ``a a b b``. The values tell, not a guess.
    """
    m = len(shards)
    if _replicas_agree(shards, cut):
        return shards
    copies = {b: m // -(-b.size // b.unit) for b in cut.blocks if b.replicate}
    if len(cut.blocks) == 1:
        units = m // copies[cut.blocks[0]]
        turned = [shards[(i % copies[cut.blocks[0]]) * units + i // copies[cut.blocks[0]]] for i in range(m)]
        if _replicas_agree(turned, cut):
            return turned
    raise CheckpointError(f"{where}: ranks that should hold copies of the same heads hold different values")


def _replicas_agree(shards: list[MemoryShard], cut: ShardSpec) -> bool:
    held: dict[tuple[int, int], Tensor] = {}
    assert cut.dim is not None  # noqa: S101
    for rank, shard in enumerate(shards):
        for piece in cut.pieces(rank, len(shards)):
            t = shard.tensor.narrow(cut.dim, piece.local, piece.length)
            first = held.setdefault((piece.full, piece.length), t)
            if first is not t and not torch.equal(first, t):
                return False
    return True
