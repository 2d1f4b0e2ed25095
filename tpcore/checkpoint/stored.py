"""One tensor in a checkpoint, its layout, and the reads that make this rank's shard of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layers.sharding import sharding
from ..layout.layout import Layout
from ..layout.mesh import DATA, Mesh
from ..layout.shard import ShardSpec
from ..layout.slices import Region, narrowed, slabs
from ..runtime.context import ParallelContext
from .storage.files import CHUNK
from .storage.tensorfile import FileTensor, HasShape

# one object for tensors of one shape, so that tables which are made for it are found at once
over_tp = cache(lambda degree: Mesh({"tp": degree}))
_cut_over_tp = lru_cache(1 << 12)(lambda spec: Layout.of(spec, "tp"))
ONE = over_tp(1)


class Shard(HasShape, Protocol):
    """Stored bytes that can be read in part."""

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


LayoutOnRecord = Layout | Literal["unknown"] | None
"""The layout of a stored tensor. None: not recorded, so that it is not sharded if it is the same on all ranks."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in shards, one for each rank of ``mesh``. ``position``: this rank's shard, if the degree is the same."""

    where: str
    layout: LayoutOnRecord
    mesh: Mesh
    position: int | None
    shard: Callable[[int], Shard]  # opens it on demand: usually a rank needs only its own

    @classmethod
    def over_tp(
        cls, where: str, spec: ShardSpec | None, m: int, tp_rank: int | None, shard: Callable[[int], Shard]
    ) -> Stored:
        """A tensor in shards of ``m`` tp ranks, for forms without other axes."""
        return cls(where, None if spec is None else _cut_over_tp(spec), over_tp(m), tp_rank, shard)

    @cached_property
    def first(self) -> Shard:
        return self.shard(0 if self.position is None else self.position)

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The unsharded shape if the layout is recorded, otherwise the shape of a shard."""
        return self.layout.shape if isinstance(self.layout, Layout) else self.first.shape

    def kept(self, want: Layout | None, mesh: Mesh) -> bool:
        """Whether this rank's stored shard is already its part of layout ``want`` on ``mesh``."""
        if self.position is None:
            return False
        for axis, n in self.mesh.axes.items():
            if mesh.axes.get(axis, 1) != n:
                return False
        if want is None or self.layout == want:
            return True
        return not isinstance(self.layout, Layout) and self.first.shape == want.local_shape(mesh)

    def bound(self) -> str | None:
        """Why it can be loaded only at the degree of the save, or None if at any degree."""
        if isinstance(self.layout, Layout):
            return None
        if self.layout is None and self._alike:
            return None
        why = (
            "its optimizer was saved without the model, or not made from model.named_parameters()"
            if self.layout == "unknown"
            else "the ranks hold different values, and nothing says how they are sharded: a model's own state_dict() "
            "knows, and the command line takes --cut"
        )
        text = f"{self.where} can be loaded only at the degree it was saved at, tp={self.mesh.size}: "
        return f"{text}how it is sharded is not on record, since {why}"

    @cached_property
    def _alike(self) -> bool:
        first, *others = (self.shard(i) for i in range(self.mesh.size))
        if isinstance(first, MemoryShard):
            return all(isinstance(s, MemoryShard) and torch.equal(first.tensor, s.tensor) for s in others)
        return len({(s.shape, s.dtype, s.crc32 if isinstance(s, FileTensor) else None) for s in (first, *others)}) == 1

    def known_layout(self) -> Layout:
        """CheckpointError if it is not known."""
        if isinstance(self.layout, Layout):
            return self.layout
        if (why := self.bound()) is not None:
            raise CheckpointError(why)
        return Layout(self.first.shape)

    def plan(self, want: Layout | None = None, rank: int = 0, mesh: Mesh = ONE) -> ReadPlan:
        """How the part of ``rank`` on ``mesh`` is read; of one rank, the unsharded tensor. ``want``: its layout;
        None for the recorded one. Opens the shards. CheckpointError for a mesh that the layout does not fit."""
        layout = None if self.kept(want, mesh) else self.known_layout()
        if layout is None or (want in (None, layout) and not layout.axes):
            nothing, shape = (0,) * len(self.first.shape), self.first.shape
            return ReadPlan(self, shape, [(self.first, Region(0, nothing, nothing, shape))])
        want = want or layout
        try:
            shape = want.local_shape(mesh)
        except ValueError as e:
            raise CheckpointError(f"{self.where}: {e}") from None
        regions = layout.regions(self.mesh, want, rank, mesh)
        return ReadPlan(self, shape, [(self.shard(region.src), region) for region in regions])


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """One rank's part of a stored tensor: the shards to read, each with the region to copy. A ``Writable``."""

    stored: Stored
    shape: tuple[int, ...]
    copies: list[tuple[Shard, Region]]

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def layout(self) -> LayoutOnRecord:
        return self.stored.layout

    def verify(self, *, in_part: bool = False) -> None:
        """Compare the checksums of shards that are read whole, or of those that are read in part."""
        for shard, region in self.copies:
            if (region.size != shard.shape) == in_part:
                shard.verify()

    def fill(self, out: Tensor, start: Sequence[int] | None = None, *, check: bool = True) -> None:
        """Fill ``out`` with the slice of the part that begins at ``start``; None: with all of it. Entries that no
        shard has are padding, and become zero. ``check``: compare the checksums of shards that are read whole."""
        copies = self.copies
        if start is not None:
            every = ((shard, region.within(start, out.shape)) for shard, region in copies)
            copies = [(shard, region) for shard, region in every if 0 not in region.size]
        out = out.detach()
        # pinned, so that the next tensor is read while this one is on its way; torch keeps the memory until then
        pinned = out.device.type != "cpu" and _takes_pinned(out.device)
        direct = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype, pin_memory=pinned)
        with torch.no_grad():
            if copies and copies[0][1].size == out.shape:  # all of it
                (shard, region), *copies = copies
                shard.read(region.src_start, direct, check)
            elif sum(math.prod(region.size) for _, region in copies) < out.numel():
                direct.zero_()
            for shard, region in copies:
                shard.read(region.src_start, narrowed(direct, region.dst_start, region.size), check)
            if direct is not out:
                out.copy_(direct, non_blocking=pinned)
                self._refuse_lost_bits(direct, out)

    def _refuse_lost_bits(self, read: Tensor, out: Tensor) -> None:
        """CheckpointError for whole numbers beyond 32 bits on a device that keeps no more of them."""
        wide = read.dtype is torch.int64 and not torch.equal(read.to(torch.int32).to(read.dtype), read)
        if wide and not torch.equal(out.cpu(), read):
            text = f"{self.stored.where} has numbers beyond 32 bits, which {out.device} does not keep: leave the tensor"
            raise CheckpointError(f"{text} on the CPU")

    def tensor(self, dtype: torch.dtype | None = None) -> Tensor:
        """The part in host memory, in ``dtype`` or its own."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.fill(out)
        return out

    def fill_run(self, start: int, out: Tensor) -> None:
        """Fill ``out``, flat, with the entries from ``start`` on, numbered row by row."""
        done = 0
        for begin, size in slabs(self.shape, start, start + len(out)):
            count = math.prod(size)
            self.fill(out[done : done + count].view(size), begin)
            done += count

    def pieces(self) -> Iterator[Tensor]:
        """Rows of about a chunk: glibc's allocator reuses blocks of that size, but not larger ones."""
        for shard, _ in self.copies:
            shard.verify()
        if not self.shape:
            yield self.tensor()
            return
        rows, *row = self.shape
        step = max(1, CHUNK // max(1, math.prod(row) * self.dtype.itemsize))
        for start in range(0, rows, step):
            out = torch.empty((min(step, rows - start), *row), dtype=self.dtype)
            self.fill(out, (start, *(0 for _ in row)), check=False)
            yield out


def _takes_pinned(device: torch.device) -> bool:
    """Whether copies from pinned memory to ``device`` go on beside other work: to torch's own accelerators."""
    if not torch.accelerator.is_available():  # torch 2.6 names an accelerator only where one is
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type and _has_pinned()


@cache
def _has_pinned() -> bool:
    try:
        torch.empty(0, pin_memory=True)
    except NotImplementedError:  # an accelerator of a package beside torch may have no such memory
        return False
    return True


def layout_of(t: Tensor, ctx: ParallelContext, where: str) -> Layout | None:
    """The layout of a parameter of a parallel layer; None for any other tensor."""
    mark = sharding(t)
    if mark is None:
        return None
    layout, mesh, axes = mark.layout, mark.ctx.mesh, mark.axes
    if axes and (not set(axes).isdisjoint({*DATA} - {"ep"}) or not set(axes) <= set(ctx.mesh.axes)):
        ranks = mark.ctx.comm(*axes).group.members(mark.ctx.rank)
        axes_kept = [axis for axis in ctx.mesh.axes if axis not in DATA or axis == "ep"]
        raise ValueError(
            f"{where} is sharded over ranks {ranks} of {axes}; a checkpoint holds what is sharded over {axes_kept}"
        )
    if layout.cuts and mark.ctx.place != ctx.place:
        raise ValueError(
            f"{where} was built on mesh {dict(mesh.axes)} of rank {mark.ctx.rank} and not on this one, "
            f"{dict(ctx.mesh.axes)} of rank {ctx.rank}: save and load a model under the context that it was built under"
        )
    if tuple(t.shape) != mark.local_shape:
        raise ValueError(f"{where} has shape {tuple(t.shape)}, but its layer cuts {layout} to {mark.local_shape}")
    return layout
