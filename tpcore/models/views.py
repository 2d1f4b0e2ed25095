"""Stored tensors as a model has them: stacked, joined, divided, transposed, deinterleaved, and still read in parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.stored import Shard


@dataclass(frozen=True, eq=False)
class View:
    """A shard made of others. A part of it is read from their parts, so that a rank has no more in memory than it
    keeps."""

    parts: tuple[Shard, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def identity(self) -> object:
        return id(self)

    def verify(self) -> None:
        for part in self.parts:
            part.verify()

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        """Fill ``out`` with the region at ``starts``. This: of the parts, stacked along a new first dim."""
        for number, part in enumerate(self.parts[starts[0] : starts[0] + len(out)]):
            part.read(starts[1:], out[number], check)


@dataclass(frozen=True, eq=False)
class Joined(View):
    """The parts, one after the other along ``dim``."""

    dim: int

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        begin, at = starts[self.dim], 0
        for part in self.parts:
            low, high = max(at, begin), min(at + part.shape[self.dim], begin + out.shape[self.dim])
            if low < high:
                part.read(_moved(starts, self.dim, low - at), out.narrow(self.dim, low - begin, high - low), check)
            at += part.shape[self.dim]


@dataclass(frozen=True, eq=False)
class Divided(View):
    """What begins at ``first`` of dim ``dim`` of its one part."""

    dim: int
    first: int

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        self.parts[0].read(_moved(starts, self.dim, starts[self.dim] + self.first), out, check)


@dataclass(frozen=True, eq=False)
class Transposed(View):
    """Its one part with two dims exchanged."""

    dims: tuple[int, int]

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        one, other = self.dims
        there = _moved(_moved(starts, one, starts[other]), other, starts[one])
        self.parts[0].read(there, out.transpose(one, other), check)


@dataclass(frozen=True, eq=False)
class Deinterleaved(View):
    """The even entries of dim ``dim`` of its one part, then the odd ones. What lies between those that are wanted is
    read too, for one entry of the dims before at a time."""

    dim: int

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        if self.dim and len(out) > 1:
            for number in range(len(out)):
                self.read(_moved(starts, 0, starts[0] + number), out[number : number + 1], check)
            return
        begin, half = starts[self.dim], self.shape[self.dim] // 2
        for odd in (0, 1):
            low, high = max(odd * half, begin), min((odd + 1) * half, begin + out.shape[self.dim])
            if low < high:
                into = out.narrow(self.dim, low - begin, high - low)
                size = [2 * n - 1 if dim == self.dim else n for dim, n in enumerate(into.shape)]
                span = torch.empty(size, dtype=self.dtype)
                self.parts[0].read(_moved(starts, self.dim, 2 * (low - odd * half) + odd), span, False)
                into.copy_(span[(slice(None),) * self.dim + (slice(None, None, 2),)])


def _moved(starts: Sequence[int], dim: int, to: int) -> tuple[int, ...]:
    return (*starts[:dim], to, *starts[dim + 1 :])


def views(converter: Any, sources: Sequence[Sequence[Shard]], shapes: Sequence[tuple[int, ...]]) -> list[Shard] | None:
    """What transformers' ``converter`` makes of ``sources``, by its source patterns, as tensors of ``shapes``, by its
    targets. None if one of its operations has no view, or the tensors do not fit."""
    groups = [list(group) for group in sources]
    for op in converter.operations:
        if not groups or not all(groups) or len({(len(s.shape), s.dtype) for group in groups for s in group}) != 1:
            return None
        made = _by(op, groups, shapes)
        if made is None:
            return None
        groups = made
    fits = [[shard.shape for shard in group] for group in groups] == [[tuple(shape)] for shape in shapes]
    return [group[0] for group in groups] if fits else None


def _by(op: Any, groups: list[list[Shard]], shapes: Sequence[tuple[int, ...]]) -> list[list[Shard]] | None:
    kind, dim, (first, *others) = type(op).__name__, getattr(op, "dim", 0), groups[0]
    if kind == "MergeModulelist" and dim == 0:
        return _every([_stacked(group) for group in groups])
    if kind == "Concatenate":
        return _every([_joined([shard for group in groups for shard in group], dim)])
    if kind == "ErnieFuseAndSplitTextVisionExperts" and (op.stack_dim, op.concat_dim) == (0, 1):
        size = math.ceil(len(groups[0]) / len(shapes))
        rows = [[_stacked(g[at : at + size]) for g in groups] for at in range(0, len(groups[0]), size)]
        return _every([None if None in row else _joined([s for s in row if s is not None], 1) for row in rows])
    if others or len(groups) > 1:
        return None
    sizes = [shape[dim] for shape in shapes if len(shape) > dim]
    if kind in ("Chunk", "Split") and sum(sizes) == first.shape[dim]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        if kind == "Chunk" and (op.num_shards_attribute is not None or len(set(sizes)) > 1):
            return None
        cut = zip(starts, sizes, strict=True)
        return [[Divided((first,), _moved(first.shape, dim, size), dim, start)] for start, size in cut]
    if kind == "Transpose":
        if op.check_dims and first.shape == tuple(shapes[0]):
            return [[first]]
        one, other = op.dim0, op.dim1
        shape = _moved(_moved(first.shape, one, first.shape[other]), other, first.shape[one])
        return [[Transposed((first,), shape, (one, other))]]
    if kind == "Interleave" and not op.inverse and first.shape[dim] % 2 == 0:
        return [[Deinterleaved((first,), first.shape, dim)]]
    return None


def _every(made: list[View | None]) -> list[list[Shard]] | None:
    return None if None in made else [[view] for view in made if view is not None]


def _stacked(shards: list[Shard]) -> View | None:
    alike = len({shard.shape for shard in shards}) == 1
    return View(tuple(shards), (len(shards), *shards[0].shape)) if alike else None


def _joined(shards: Sequence[Shard], dim: int) -> View | None:
    alike = len({_moved(shard.shape, dim, 0) for shard in shards}) == 1
    total = sum(shard.shape[dim] for shard in shards) if alike else 0
    return Joined(tuple(shards), _moved(shards[0].shape, dim, total), dim) if alike else None
