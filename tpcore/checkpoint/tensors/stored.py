"""One tensor in a checkpoint, its cut, and the reads that make this rank's shard of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layers.sharding import sharding
from ...layout.layout import Layout
from ...layout.mesh import DATA, Mesh
from ...layout.shard import ShardSpec
from ...layout.slices import Region, narrowed, slabs
from ...runtime.context import ParallelContext
from ..storage.tensorfile import FileTensor


class Shard(Protocol):
    """Stored bytes that can be read in part."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def identity(self) -> object:
        """Equal for shards of the same stored bytes."""

    def verify(self) -> None:
        """Compare with the recorded checksum, if there is one."""

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        """Fill ``out``, a CPU tensor, with the region at ``starts``. ``check``: compare the checksum too."""


@dataclass(frozen=True, eq=False)
class MemoryShard:
    """A tensor mapped by ``torch.load``: only bytes that are used are read from disk."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def identity(self) -> object:
        t = self.tensor
        return t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype

    def verify(self) -> None:
        pass  # torch's format has only the zip file's checksums, which torch does not compare

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        out.copy_(narrowed(self.tensor, starts, out.shape))


Cut = Layout | Literal["unknown"] | None
"""The cut of a stored tensor. None: not recorded, so the tensor is uncut if it is the same on all ranks."""

Parts = tuple[tuple[Shard, Region], ...]
"""The shards that a rank's part is made of, each with the region to copy."""


def within(parts: Parts, start: Sequence[int], size: Sequence[int]) -> Parts:
    """The shards and regions that a box of the part is made of."""
    every = ((shard, region.within(start, size)) for shard, region in parts)
    return tuple((shard, region) for shard, region in every if 0 not in region.size)


@dataclass(frozen=True, eq=False)
class Job:
    """Fills ``out`` from regions of shards. Unless ``covered``, the rest becomes zero."""

    out: Tensor
    parts: Parts
    covered: bool

    def verify(self) -> None:
        """Compare the checksums of shards that will be read whole."""
        for shard, region in self.parts:
            if region.size == shard.shape:
                shard.verify()

    def run(self, *, check: bool = True) -> None:
        out = self.out.detach()
        # pinned, so that the next tensor is read while this one is on its way; torch keeps the memory until then
        direct = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype, pin_memory=out.is_cuda)
        with torch.no_grad():
            if not self.covered:
                direct.zero_()
            for shard, region in self.parts:
                shard.read(region.src_start, narrowed(direct, region.dst_start, region.size), check)
            if direct is not out:
                out.copy_(direct, non_blocking=out.is_cuda)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in shards, one for each rank of ``mesh``. ``own``: the index of this rank's shard, if the
    degree is the same."""

    where: str
    cut: Cut
    mesh: Mesh
    own: int | None
    shard: Callable[[int], Shard]  # opens it on demand: usually a rank needs only its own

    @classmethod
    def over_tp(
        cls, where: str, cut: ShardSpec | None, m: int, own: int | None, shard: Callable[[int], Shard]
    ) -> Stored:
        """A tensor in shards of ``m`` tp ranks, for forms without other axes."""
        return cls(where, None if cut is None else Layout.of(cut, "tp"), Mesh({"tp": m}), own, shard)

    @property
    def first(self) -> Shard:
        return self.shard(0 if self.own is None else self.own)

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The unsharded shape if the cut is recorded, otherwise the shape of a shard."""
        return self.cut.shape if isinstance(self.cut, Layout) else self.first.shape

    def kept(self, want: Layout | None, mesh: Mesh) -> bool:
        """Whether this rank's stored shard is already its part of layout ``want`` on ``mesh``."""
        if self.own is None or any(mesh.axes.get(a, 1) != n for a, n in self.mesh.axes.items()):
            return False
        if want is None or self.cut == want:
            return True
        return not isinstance(self.cut, Layout) and self.first.shape == want.local_shape(mesh)

    def bound(self) -> str | None:
        """Why it can be loaded only at the degree of the save, or None if at any degree."""
        if isinstance(self.cut, Layout):
            return None
        if self.cut is None and self._alike():
            return None
        why = (
            "its optimizer was saved without the model, or not made from model.named_parameters() (torch 2.6)"
            if self.cut == "unknown"
            else "the ranks hold different values, and nothing says how they are cut: a model's own "
            "state_dict() knows, and the command line takes --cut"
        )
        return (
            f"{self.where} can be loaded only at the degree it was saved at, tp={self.mesh.size}: "
            f"how it is cut is not on record, since {why}"
        )

    def _alike(self) -> bool:
        """Whether all shards are equal."""
        shards = [self.shard(i) for i in range(self.mesh.size)]
        if all(isinstance(s, MemoryShard) for s in shards):
            first, *others = [s.tensor for s in shards if isinstance(s, MemoryShard)]
            return all(torch.equal(first, t) for t in others)
        return len({_summary(s) for s in shards}) == 1

    def whole(self) -> tuple[Layout, Mesh]:
        """The layout of its cut, and the mesh. CheckpointError if the cut is unknown."""
        if isinstance(self.cut, Layout):
            return self.cut, self.mesh
        why = self.bound()
        if why is not None:
            raise CheckpointError(why)
        return Layout(self.first.shape), self.mesh

    def local_shape(self, want: Layout | None, mesh: Mesh) -> tuple[int, ...]:
        """Shape of a rank's part on ``mesh``. ``want``: the layout to make; None for the recorded one.
        CheckpointError for a mesh that the layout does not fit."""
        if self.kept(want, mesh):
            return self.first.shape
        layout = want or self.whole()[0]
        try:
            return layout.local_shape(mesh)
        except ValueError as e:
            raise CheckpointError(f"{self.where}: {e}") from None

    def parts(self, want: Layout | None, rank: int, mesh: Mesh) -> tuple[Parts, bool]:
        """The regions of shards that make up the part of ``rank`` on ``mesh``, and whether they cover it."""
        if self.kept(want, mesh):
            nothing = (0,) * len(self.first.shape)
            return ((self.first, Region(0, nothing, nothing, self.first.shape)),), True
        cut, there = self.whole()
        want = want or cut
        regions = tuple(cut.regions(there, want, rank, mesh))
        covered = sum(math.prod(r.size) for r in regions) == math.prod(want.local_shape(mesh))
        return tuple((self.shard(r.src), r) for r in regions), covered

    def job(self, out: Tensor, want: Layout | None, rank: int, mesh: Mesh) -> Job:
        return Job(out, *self.parts(want, rank, mesh))

    def read_run(self, start: int, out: Tensor, want: Layout | None, rank: int, mesh: Mesh) -> None:
        """Fill ``out``, flat, with the entries of that part from ``start`` on, numbered row by row."""
        (parts, covered), done = self.parts(want, rank, mesh), 0
        for begin, size in slabs(self.local_shape(want, mesh), start, start + len(out)):
            count = math.prod(size)
            Job(out[done : done + count].view(size), within(parts, begin, size), covered).run()
            done += count


def _summary(shard: Shard) -> object:
    crc32 = shard.crc32 if isinstance(shard, FileTensor) else None
    return shard.shape, shard.dtype, crc32


def layout_of(t: Tensor, ctx: ParallelContext, where: str) -> Layout | None:
    """The layout of a parameter of a parallel layer; None for any other tensor."""
    found = sharding(t)
    if found is None:
        return None
    layout, mesh, axes = found.layout, found.ctx.mesh, found.axes
    if axes and (not set(axes).isdisjoint({*DATA} - {"ep"}) or not set(axes) <= set(ctx.mesh.axes)):
        mine = found.ctx.comm(*axes).group.members(found.ctx.rank)
        held = [axis for axis in ctx.mesh.axes if axis not in DATA or axis == "ep"]
        raise ValueError(f"{where} is cut over ranks {mine} of {axes}; a checkpoint holds what is cut over {held}")
    if layout.cuts and found.ctx.place != ctx.place:
        raise ValueError(
            f"{where} was built on mesh {dict(mesh.axes)} of rank {found.ctx.rank} and not on this one, "
            f"{dict(ctx.mesh.axes)} of rank {ctx.rank}: save and load a model under the context that it was built under"
        )
    if tuple(t.shape) != layout.local_shape(mesh):
        raise ValueError(
            f"{where} has shape {tuple(t.shape)}, but its layer cuts {layout} to {layout.local_shape(mesh)}"
        )
    return layout
