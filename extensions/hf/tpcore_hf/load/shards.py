"""The shards of an engine at another degree, made of those of a sharded model: who sends which box to whom."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpcore.errors import CheckpointError
from tpcore.layers.sharding import sharding
from tpcore.layout.layout import Layout
from tpcore.layout.mesh import Mesh
from tpcore.layout.slices import Box, Region, narrowed
from tpcore.runtime.consensus import gather
from tpcore.runtime.context import current

from .gathered import NO_MERGES, Gathered, Merge, whole_entries
from .names import MERGED, stored_as


class ShardPiece(NamedTuple):
    """A box of ``size`` of the file's tensor ``name``: rank ``source`` of the model sends it to rank ``target`` of the
    engine, in whose shard it begins at ``start``."""

    name: str
    dtype: torch.dtype
    source: int
    target: int
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.size).numel()


@dataclass(frozen=True)
class _Place:
    """Where a tensor of a file, of ``shape``, lies in one of the model: it begins at ``start`` there. ``dims``: the
    model's dim of each of its dims; None for one of size 1 that only it has."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    dims: tuple[int | None, ...]

    def lifted(self, box: Box) -> Box:
        """``box`` of the file's tensor as one of the model's."""
        full, local, size = list(self.start), [0] * len(self.start), [1] * len(self.start)
        for j, dim in enumerate(self.dims):
            if dim is not None:
                full[dim] += box.full[j]
                local[dim], size[dim] = box.local[j], box.size[j]
        return Box(tuple(full), tuple(local), tuple(size), box.copies)

    def along(self, values: tuple[int, ...], missing: int) -> tuple[int, ...]:
        """``values`` of the model's dims as those of the file's."""
        return tuple(missing if dim is None else values[dim] for dim in self.dims)

    def turned(self, part: Tensor) -> Tensor:
        """A box of the model's tensor with the dims of the file's."""
        dims = [dim for dim in self.dims if dim is not None]
        rest = [dim for dim in range(part.ndim) if dim not in dims]
        return part.permute([*dims, *rest]).reshape(self.along(tuple(part.shape), 1))


class ShardSource:
    """What ranks of ``model`` send so that an engine at another degree has its shards, nothing whole anywhere.

    ``pieces`` is the same on each rank, and the engine is told it once. An iterator gives those that this rank sends,
    with their values of that moment, in that order: ranks that send and receive in it do not wait in a circle. Each
    entry of an engine's shard comes once. Making it is collective over pipeline stages, sending is not collective.

    Args:
        model: of transformers or of tpcore's layers, on any mesh. Adapters of a ``PeftModel`` are merged on the way.
        mesh: of the engine.
        layouts: of the engine's shards on ``mesh``, by the names of ``WeightSource(model).metadata()``; a tensor that
            is not named is whole on each of its ranks.
        dtype: of the floating tensors; by default the model's.

    Raises:
        CheckpointError: files have a tensor merged with others, or changed otherwise than by dividing and turning it.
        ValueError: ``layouts`` names a tensor that there is not, or has it in another shape.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, layouts: Mapping[str, Layout], *, dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        inner, state, merges = state_of(model)
        entries = whole_entries(inner, state, set(), dtype, merges)
        places, shapes = dict[str, dict[str, _Place]](), dict[str, tuple[int, ...]]()
        for name, entry in entries.items():
            places[name] = _places(inner, entry)
            if shapes.keys() & places[name].keys():  # each alone would be taken for all of it
                raise CheckpointError(MERGED.format(type(inner).__name__, name))
            shapes |= {file_name: place.shape for file_name, place in places[name].items()}
        for name, layout in layouts.items():
            if layout.shape != shapes.get(name):
                raise ValueError(f"layouts has {name!r} as {layout.shape}: the model has {shapes.get(name, 'no such')}")
        targets = {name: layouts.get(name, Layout(shape)) for name, shape in shapes.items()}
        self._moves = [
            _Move(name, place, *move)
            for name, own in _own_layouts(entries).items()
            for file_name, place in places[name].items()
            for move in _moves(file_name, place, entries[name], own, targets[file_name], mesh)
        ]

    @property
    def pieces(self) -> list[ShardPiece]:
        """All of them."""
        return [move.piece for move in self._moves]

    def __iter__(self) -> Iterator[tuple[ShardPiece, Tensor]]:
        """Those of this rank, on the model's device."""
        rank, (_, state, merges) = current().rank, state_of(self.model)
        mine = (move for move in self._moves if move.piece.source == rank)
        for name, of_tensor in groupby(mine, lambda move: move.name):
            moves = list(of_tensor)
            with merges.get(name, nullcontext)():
                part = state[name].detach().to(moves[0].piece.dtype, copy=name in merges)
            for _, place, piece, region in moves:
                yield piece, place.turned(narrowed(part, region.src_start, region.size)).contiguous()


class _Move(NamedTuple):
    """A piece: a ``region`` of the model's tensor ``name``, with the dims that ``place`` says."""

    name: str
    place: _Place
    piece: ShardPiece
    region: Region


def _own_layouts(entries: Mapping[str, Gathered]) -> dict[str, Layout]:
    """Of all stages' tensors. Collective over stages. The ranks of a stage have all of what is there."""
    ctx = current()
    mine = {name: _layout(entry.tensor).to_json() for name, entry in entries.items() if entry.tensor is not None}
    stages = gather(mine, ctx.comm("pp")) if ctx.mesh.axes.get("pp", 1) > 1 else [mine]
    return {n: replace(Layout.from_json(stages[entry.stage][n]), slot=None) for n, entry in entries.items()}


def _moves(
    name: str, place: _Place, entry: Gathered, own: Layout, target: Layout, mesh: Mesh
) -> Iterator[tuple[ShardPiece, Region]]:
    of_model = current().mesh
    stage = {"pp": entry.stage} if "pp" in of_model.axes and "pp" not in own.axes else {}
    for to in range(mesh.size):
        for region in own.overlaps(of_model, [place.lifted(box) for box in target.boxes(to, mesh)]):
            source = of_model.rank({**of_model.coords(region.src), **stage})
            start, size = place.along(region.dst_start, 0), place.along(region.size, 1)
            yield ShardPiece(name, entry.dtype, source, to, start, size), region


def _layout(tensor: Tensor) -> Layout:
    mark = sharding(tensor)
    return Layout(tuple(tensor.shape)) if mark is None else mark.layout


class _Views(TorchFunctionMode):
    """Inside, nothing is copied to lie in order, so that what is made of a tensor stays a view of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.contiguous, Tensor.clone) else func(*args, **(kwargs or {}))


def _places(model: Any, entry: Gathered) -> dict[str, _Place]:
    """The tensors that files have of ``entry``, by their names, and where they lie in it."""
    tensor = torch.empty(entry.shape, device="meta")
    if not hasattr(model, "all_tied_weights_keys"):  # no model of transformers
        return {entry.name: _place(tensor, tensor)}
    with _Views():
        stored = stored_as(model, {entry.name: tensor})
    for view in stored.values():
        if view is not tensor and view._base is not tensor:
            raise CheckpointError(f"{entry.name} is computed for its file: WeightSource gives it to all ranks, whole")
    return {name: _place(view, tensor) for name, view in stored.items()}


def _place(view: Tensor, tensor: Tensor) -> _Place:
    """By its strides: ``tensor`` lies in order."""
    start, rest = [], view.storage_offset()
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        start.append(rest // stride if size > 1 else 0)
        rest -= start[-1] * stride
    by_stride = {stride: dim for dim, stride in enumerate(tensor.stride()) if tensor.shape[dim] > 1}
    dims = tuple(by_stride[s] if n > 1 else None for n, s in zip(view.shape, view.stride(), strict=True))
    return _Place(tuple(view.shape), tuple(start), dims)


def state_of(model: Any) -> tuple[Any, dict[str, Tensor], Mapping[str, Merge]]:
    """The model of transformers in ``model``, its tensors by their names without adapters, and adapters to merge."""
    if "peft" in sys.modules:  # no model has adapters before
        from ..adapters.merged import merged_state

        return merged_state(model)
    return model, model.state_dict(keep_vars=True), NO_MERGES
