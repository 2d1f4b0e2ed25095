"""Distribution of one dim's features over a layer's ranks, as constants for the forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..layout.shard import ShardSpec

Index = NDArray[np.int64]
_MARK = "tpcore_unpadded"


def mark_unpadded(y: Tensor, size: int) -> None:
    """Store on ``y``, this rank's features with padding, the number of all ranks' features without it."""
    setattr(y, _MARK, size)


def note_padding(cut: ShardSpec, comm: Comm) -> None:
    """Note the width of this cut's parts if they are padded: what operations make of them has no mark."""
    if cut.padded(comm.size):
        comm.padded.add(cut.local_shape(comm.size)[cut.dim or 0])


def marked_like(y: Tensor, other: Tensor) -> Tensor:
    """``y`` with the mark of ``other``, of which it is a view or a copy."""
    if (size := unpadded(other)) is not None:
        mark_unpadded(y, size)
    return y


def unpadded(y: Tensor) -> int | None:
    """The number that ``mark_unpadded`` stored; None for other tensors, such as results of operations."""
    found: int | None = getattr(y, _MARK, None)
    return found


@dataclass(frozen=True, eq=False)
class Features:
    """Index tables of one cut, computed once: computing them in each forward took 62 us at tp=32.

    They are arrays, because a tensor made under inference_mode or while tracing is unusable afterwards.
    """

    size: int
    padded: bool = False
    plain: bool = True
    """Whether the concatenation of all ranks' features is the unsharded order, without padding."""
    order: Index | None = None
    """Position of each feature in the concatenation of all ranks' features; None if unchanged."""
    spread: Index | None = None
    """The feature at each position of that concatenation. Positions of padding name any feature."""
    filled: NDArray[np.bool_] | None = None
    """[ranks, features of one rank]: False for padding. None without padding."""

    @classmethod
    def of(cls, spec: ShardSpec, n: int) -> Features:
        """The tables of ``spec``, a spec of this dim alone, over ``n`` ranks."""
        (size,) = spec.shape
        if n == 1 or spec.dim is None or spec.contiguous(n):
            return cls(size)
        order, held = spec.gathered_index(n).numpy(), spec.source_index(n).numpy()
        padded, in_order = spec.padded(n), np.array_equal(order, np.arange(size))
        spread = held.clip(min=0).reshape(-1)
        return cls(size, padded, False, None if in_order else order, spread, held >= 0 if padded else None)

    def restored(self, y: Tensor) -> Tensor:
        """Gathered features in their unsharded order, without padding."""
        if self.order is not None:
            return y.index_select(-1, torch.from_numpy(self.order).to(y.device))
        return y.narrow(-1, 0, self.size) if self.padded else y

    def scatter(self, x: Tensor, comm: Comm) -> Tensor:
        """This rank's features of the last dim. Padding holds arbitrary features, which ``mask`` clears."""
        if self.spread is not None:
            x = x.index_select(-1, torch.from_numpy(self.spread).to(x.device))
        return ops.scatter(x, comm, -1)

    def mask(self, x: Tensor, comm: Comm) -> Tensor:
        """``x`` with this rank's padding zeroed, in backward too. The rank is data, not a Python constant."""
        if self.filled is None:
            return x
        mine = torch.from_numpy(self.filled).to(x.device).index_select(0, comm.position).squeeze(0)
        return x * mine.to(x.dtype)
