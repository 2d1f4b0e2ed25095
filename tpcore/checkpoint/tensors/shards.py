"""Shards of stored tensors, which can be read in part: tensors of safetensors files or of torch files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...layout.slices import narrowed


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
