"""One shard of a stored tensor that can be read in part. A tensor of a safetensors file is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...boxes import narrowed


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
        out.copy_(narrowed(self.tensor, starts, out.shape))
