"""The layout of one tensor on a mesh: which boxes of the full tensor each rank has, and where in its part."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from .mesh import Mesh
from .shard import ShardSpec
from .slices import Box, Region, Share, narrowed, offset


@dataclass(frozen=True)
class Slot:
    """Slot ``index`` of ``of`` slots that are spread in order over ``axis``: one layer on its stage. ``ends``: the
    first slot behind each coordinate, on a mesh of as many; on others they are spread evenly."""

    axis: str
    index: int
    of: int
    ends: tuple[int, ...] = ()

    def coordinate(self, mesh: Mesh) -> int:
        size = mesh.axes.get(self.axis, 1)
        return bisect_right(self.ends, self.index) if len(self.ends) == size else self.index * size // self.of


@dataclass(frozen=True)
class AxisCut:
    """A cut over ``axes``. Its ranks count in the order of ``Mesh.group(*axes)``."""

    axes: tuple[str, ...]
    spec: ShardSpec

    def degree(self, mesh: Mesh) -> int:
        """The number of parts on ``mesh``; an axis that the mesh lacks has size 1."""
        return math.prod(mesh.axes.get(axis, 1) for axis in self.axes)

    def rank(self, mesh: Mesh, at: Mapping[str, int]) -> int:
        rank = 0
        for axis in self.axes:
            rank = rank * mesh.axes.get(axis, 1) + at.get(axis, 0)
        return rank


@dataclass(frozen=True)
class Layout:
    """Ordered cuts of one tensor. Names no rank and no world size, so it holds for any mesh.

    Each cut is a ``ShardSpec`` over one or more mesh axes. A later cut divides the part that the earlier cuts
    leave. On a dim of its own it follows its spec; a dim that is already cut it divides into even chunks of
    the local part, padding included. Ranks along axes without a cut have equal parts. With a ``slot`` the
    tensor is at one coordinate of an axis only; ranks elsewhere have no entries.

    A position on a mesh is a rank, as ``Mesh.coords`` counts them. Laws, for every mesh: the parts tile the
    full tensor; ``unshard(parts) == full``; ``reshard(parts, mesh, r, other) == shard(full, r, other)``.
    """

    shape: tuple[int, ...]
    cuts: tuple[AxisCut, ...] = ()
    slot: Slot | None = None

    def __post_init__(self) -> None:
        named, dims = [] if self.slot is None else [self.slot.axis], set()
        for cut in self.cuts:
            named += cut.axes
            if cut.spec.shape != self.shape or cut.spec.dim is None or not cut.axes:
                raise ValueError(f"{cut} is no cut over an axis of a tensor of shape {self.shape}")
            if cut.spec.dim in dims and cut.spec != ShardSpec(self.shape, cut.spec.dim):
                raise ValueError(
                    f"dim {cut.spec.dim} of {self.shape} is sharded twice: the later cut makes even chunks and "
                    f"takes no blocks, not {cut.spec.blocks}"
                )
            dims.add(cut.spec.dim)
        if len(set(named)) < len(named):
            raise ValueError(f"an axis is used twice in {named}: each axis places a tensor once")
        if self.slot is not None and not 0 <= self.slot.index < self.slot.of:
            raise ValueError(f"{self.slot} has no such index")

    @classmethod
    def of(cls, spec: ShardSpec, *axes: str, slot: Slot | None = None) -> Layout:
        """The layout of one cut, or of no cut if ``spec`` cuts no dim."""
        return cls(spec.shape, () if spec.dim is None else (AxisCut(axes, spec),), slot)

    @cached_property
    def spec(self) -> ShardSpec:
        """The spec of the only cut; a ValueError if there are several."""
        if len(self.cuts) > 1:
            raise ValueError(f"{self} has {len(self.cuts)} cuts, not one")
        return self.cuts[0].spec if self.cuts else ShardSpec(self.shape)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different entries."""
        of_cuts = tuple([axis for cut in self.cuts for axis in cut.axes])
        return of_cuts if self.slot is None else (*of_cuts, self.slot.axis)

    def axes_on(self, mesh: Mesh) -> tuple[str, ...]:
        """Those of ``axes`` whose size on ``mesh`` is above 1, in mesh order."""
        return tuple(axis for axis, size in mesh.axes.items() if size > 1 and axis in self.axes)

    def without(self, axis: str) -> Layout:
        """The layout of the parts of all ranks along ``axis``, the only one of the last cut, put together."""
        if not self.cuts or self.cuts[-1].axes != (axis,):
            raise ValueError(f"{self} has no last cut over {axis} alone")
        return replace(self, cuts=self.cuts[:-1])

    def boxes(self, position: int, mesh: Mesh) -> tuple[Box, ...]:
        """The boxes of ``position``. All else derives from this; entries outside every box are padding."""
        return _boxes(self, position, mesh)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of one part, padding included; the same on every rank that has one."""
        return _local_shape(self, mesh)

    def shares(self, mesh: Mesh) -> tuple[Share, ...]:
        """The part, divided by the number of copies of each entry, alike on every rank: one program sums them."""
        return _shares(self, mesh)

    def copies(self, mesh: Mesh) -> int:
        """How many ranks of ``mesh`` have each entry; ValueError if that differs by block."""
        counts = {share.copies for share in self.shares(mesh)}
        if len(counts) > 1:
            raise ValueError(f"blocks of {self} are held by {sorted(counts)} positions each, not alike")
        return counts.pop() * mesh.size // math.prod(mesh.axes[axis] for axis in self.axes_on(mesh))

    def padded(self, mesh: Mesh) -> bool:
        """Whether some part has padding: entries outside the full tensor."""
        volume = math.prod(self.local_shape(mesh))
        return any(sum(math.prod(b.size) for b in self.boxes(r, mesh)) < volume for r in self.positions(mesh))

    def positions(self, mesh: Mesh) -> Iterator[int]:
        """One rank for each different part: the ranks at 0 on every axis that the layout does not name."""
        for rank in range(mesh.size):
            coords = mesh.coords(rank)
            if all(i == 0 or axis in self.axes for axis, i in coords.items()) and (
                self.slot is None or coords.get(self.slot.axis, 0) == self.slot.coordinate(mesh)
            ):
                yield rank

    def regions(self, mesh: Mesh, target: Layout, position: int, other: Mesh) -> tuple[Region, ...]:
        """The copies that build the part of ``position`` on ``other`` under ``target``: each entry once."""
        return _regions(self, mesh, target, position, other)

    def overlaps(self, mesh: Mesh, boxes: Sequence[Box]) -> Iterator[Region]:
        """The copies that fill ``boxes``, whatever part they lie in: each entry once."""
        for (src, source), box in product(_once(self, mesh), boxes):
            lo = tuple(map(max, source.full, box.full))
            ends = zip(source.full, source.size, box.full, box.size, strict=True)
            size = tuple(min(a + n, b + m) - s for s, (a, n, b, m) in zip(lo, ends, strict=True))
            if all(length > 0 for length in size):
                yield Region(src, offset(source, lo), offset(box, lo), size)

    def reshard(self, parts: Sequence[Tensor], mesh: Mesh, position: int, other: Mesh) -> Tensor:
        """The part of ``position`` on ``other``, from the parts of all ranks of ``mesh``."""
        if len(parts) != mesh.size:
            raise ValueError(f"{len(parts)} parts for a mesh of {mesh.size} ranks {dict(mesh.axes)}")
        shape = self.local_shape(mesh)
        for part in parts:
            if tuple(part.shape) != shape:
                raise ValueError(f"a part of {self} on {mesh} has shape {shape}, not {tuple(part.shape)}")
        out = parts[0].new_zeros(self.local_shape(other))
        for region in self.regions(mesh, self, position, other):
            source = narrowed(parts[region.src], region.src_start, region.size)
            narrowed(out, region.dst_start, region.size).copy_(source)
        return out

    def shard(self, full: Tensor, position: int, mesh: Mesh) -> Tensor:
        return self.reshard([full], _ONE, position, mesh)

    def unshard(self, parts: Sequence[Tensor], mesh: Mesh) -> Tensor:
        return self.reshard(parts, mesh, 0, _ONE)

    def to_json(self) -> dict[str, Any]:
        cuts: list[dict[str, Any]] = [{"axes": list(cut.axes), **cut.spec.to_json()} for cut in self.cuts]
        for cut in cuts:
            del cut["shape"]
        slot = {} if self.slot is None else {"slot": astuple(self.slot)}
        return {"shape": list(self.shape), "cuts": cuts, **slot}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        shape = tuple(int(s) for s in data["shape"])
        cuts = tuple(
            AxisCut(tuple(map(str, c["axes"])), ShardSpec.from_json({**c, "shape": shape})) for c in data["cuts"]
        )
        slot = data.get("slot")
        ends = () if slot is None else tuple(map(int, (*slot, ())[3]))
        return cls(shape, cuts, None if slot is None else Slot(str(slot[0]), int(slot[1]), int(slot[2]), ends))

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        cuts = [str(c.spec).removeprefix(f"{size} ") + f" over {'x'.join(c.axes)}" for c in self.cuts]
        slot = [] if self.slot is None else [f"place {self.slot.index} of {self.slot.of} on {self.slot.axis}"]
        return f"{size} {', then '.join(cuts) or 'replicated'}{''.join(', ' + s for s in slot)}"


_ONE = Mesh({"tp": 1})


class _Run(NamedTuple):
    """A box along one dim."""

    full: int
    local: int
    length: int
    copies: int


def _steps(layout: Layout, mesh: Mesh) -> Iterator[tuple[AxisCut, int, ShardSpec]]:
    """Each cut, its dim, and its spec for that dim alone, as for a tensor of one dim."""
    extents: dict[int, int] = {}
    for cut in layout.cuts:
        dim = cut.spec.dim or 0
        spec = ShardSpec((extents[dim],), 0) if dim in extents else ShardSpec((layout.shape[dim],), 0, cut.spec.blocks)
        extents[dim] = spec.local_shape(cut.degree(mesh))[0]
        yield cut, dim, spec


@lru_cache(maxsize=1 << 12)
def _local_shape(layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    shape = list(layout.shape)
    for cut, dim, spec in _steps(layout, mesh):
        shape[dim] = spec.local_shape(cut.degree(mesh))[0]
    return tuple(shape)


@lru_cache(maxsize=1 << 14)
def _boxes(layout: Layout, position: int, mesh: Mesh) -> tuple[Box, ...]:
    coords, slot = mesh.coords(position), layout.slot
    if slot is not None and coords.get(slot.axis, 0) != slot.coordinate(mesh):
        return ()
    runs = [[_Run(0, 0, size, 1)] for size in layout.shape]
    for cut, dim, spec in _steps(layout, mesh):
        runs[dim] = list(_within(runs[dim], spec, cut.rank(mesh, coords), cut.degree(mesh)))
    boxes = []
    for along in product(*([run for run in of_dim if run.length > 0] for of_dim in runs)):
        full, local, size, copies = zip(*along, strict=True) if along else ((), (), (), ())
        boxes.append(Box(full, local, size, math.prod(copies)))
    return tuple(boxes)


def _within(runs: list[_Run], spec: ShardSpec, rank: int, n: int) -> Iterator[_Run]:
    """The parts of ``runs`` that shard ``rank`` of ``n`` keeps."""
    for piece, copies in zip(spec.pieces(rank, n), spec.block_copies(n), strict=True):
        for run in runs:
            lo = max(piece.full, run.local)
            length = min(piece.full + piece.length, run.local + run.length) - lo
            if length > 0:
                yield _Run(run.full + lo - run.local, piece.local + lo - piece.full, length, run.copies * copies)


@lru_cache(maxsize=1 << 12)
def _regions(layout: Layout, mesh: Mesh, target: Layout, position: int, other: Mesh) -> tuple[Region, ...]:
    if layout.shape != target.shape:
        raise ValueError(f"{layout} and {target} are not layouts of one tensor")
    return tuple(layout.overlaps(mesh, target.boxes(position, other)))


@lru_cache(maxsize=1 << 12)
def _shares(layout: Layout, mesh: Mesh) -> tuple[Share, ...]:
    along: dict[int, list[_Run]] = {}
    for cut, dim, spec in _steps(layout, mesh):
        n, local = cut.degree(mesh), 0
        runs = []
        for block, copies in zip(spec.blocks, spec.block_copies(n), strict=True):
            length = ShardSpec((block.size,), 0, (block,)).local_shape(n)[0]
            runs.append(_Run(0, local, length, copies))
            local += length
        if len({r.copies for r in runs if r.length}) <= 1:
            runs = [_Run(0, 0, local, max((r.copies for r in runs if r.length), default=1))]
        if dim not in along:
            along[dim] = runs
        elif len(along[dim]) == 1:
            along[dim] = [_Run(0, 0, local, along[dim][0].copies)]
        else:
            raise ValueError(f"{layout} cuts blocks that are held by different numbers of ranks once more")
    by_dim = [along.get(dim, [_Run(0, 0, size, 1)]) for dim, size in enumerate(layout.shape)]
    return tuple(
        Share(tuple(r.local for r in s), tuple(r.length for r in s), math.prod(r.copies for r in s))
        for s in product(*by_dim)
    )


@lru_cache(maxsize=1 << 10)
def _once(layout: Layout, mesh: Mesh) -> tuple[tuple[int, Box], ...]:
    """The different boxes of the full tensor, each with the first rank that has it. Its copies are sharded alike."""
    first: dict[tuple[Any, Any], tuple[int, Box]] = {}
    for rank in layout.positions(mesh):
        for box in layout.boxes(rank, mesh):
            first.setdefault((box.full, box.size), (rank, box))
    return tuple(first.values())
