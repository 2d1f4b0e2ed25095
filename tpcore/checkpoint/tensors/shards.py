"""One shard of a stored tensor, on the disk or mapped, that can be read in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...storage.tensorfile import TensorFile, TensorPlace


class Shard(Protocol):
    """Stored bytes that can be read in part."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def identity(self) -> object:
        """Equal for shards that are the same stored bytes."""

    def verify(self) -> None:
        """Compare with the checksum on record, if there is one."""

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        """Fill ``out``, a CPU tensor, with the region from ``starts`` on; ``check`` it as ``verify`` does."""


@dataclass(frozen=True)
class FileShard:
    """A tensor of a safetensors file."""

    file: TensorFile
    layout: TensorPlace

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def identity(self) -> object:
        return self.file.path, self.layout.start, self.layout.nbytes

    def verify(self) -> None:
        self.file.verify(self.layout)

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        self.file.read(self.layout, starts, out, check=check)


@dataclass(frozen=True, eq=False)
class MemoryShard:
    """A tensor that ``torch.load`` has mapped: only what is read of it comes off the disk."""

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
        pass  # no checksums in torch's format beyond those of the zip file, which torch does not compare

    def read(self, starts: Sequence[int], out: Tensor, check: bool) -> None:
        out.copy_(box(self.tensor, starts, out.shape))


def box(t: Tensor, starts: Sequence[int], size: Sequence[int]) -> Tensor:
    """The part of ``t`` of this size that begins at ``starts``."""
    for dim, (start, length) in enumerate(zip(starts, size, strict=True)):
        if length != t.shape[dim]:
            t = t.narrow(dim, start, length)
    return t
