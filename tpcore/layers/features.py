"""How the features of one dim lie over a layer's ranks, as constants that a forward reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import ops
from ..comm import Comm
from ..shard import ShardSpec

Index = NDArray[np.int64]
_MARK = "tpcore_unpadded"


def mark_unpadded(y: Tensor, size: int) -> None:
    """Let ``y``, this rank's features with padding among them, tell how many all ranks have without it."""
    setattr(y, _MARK, size)


def marked_like(y: Tensor, other: Tensor) -> Tensor:
    """``y``, the same tensor as ``other`` in another guise, with its mark."""
    if (size := unpadded(other)) is not None:
        mark_unpadded(y, size)
    return y


def unpadded(y: Tensor) -> int | None:
    """What ``mark_unpadded`` left; None on other tensors, such as what an operation makes of ``y``."""
    found: int | None = getattr(y, _MARK, None)
    return found


@dataclass(frozen=True, eq=False)
class Features:
    """Index tables of one cut, made by the constructor: asking the spec in each forward took 62 us at tp=32.

    Arrays and not tensors: a tensor made under inference_mode or while tracing is unfit for the next use.
    """

    size: int
    padded: bool = False
    plain: bool = True
    """Whether the ranks hold runs of the features in their order, without padding."""
    order: Index | None = None
    """Where each feature stands once all ranks' are side by side; None if in its own place."""
    spread: Index | None = None
    """Which feature stands at each place once all ranks' are side by side; any, where that is padding."""
    filled: NDArray[np.bool_] | None = None
    """[ranks, features of one rank]: whether the place holds a feature; None without padding."""

    @classmethod
    def of(cls, spec: ShardSpec, n: int) -> Features:
        """Of a spec of this dim alone."""
        (size,) = spec.shape
        if n == 1 or spec.dim is None or spec.contiguous(n):
            return cls(size)
        order, held = spec.gathered_index(n).numpy(), spec.source_index(n).numpy()
        padded, in_order = spec.padded(n), np.array_equal(order, np.arange(size))
        spread = held.clip(min=0).reshape(-1)
        return cls(size, padded, False, None if in_order else order, spread, held >= 0 if padded else None)

    def restored(self, y: Tensor) -> Tensor:
        """The features in their unsharded order, without padding, once all ranks' are gathered."""
        if self.order is not None:
            return y.index_select(-1, torch.from_numpy(self.order).to(y.device))
        return y.narrow(-1, 0, self.size) if self.padded else y

    def scatter(self, x: Tensor, comm: Comm) -> Tensor:
        """This rank's features of the last dim. Padded places take any feature: ``mask`` clears them."""
        if self.spread is not None:
            x = x.index_select(-1, torch.from_numpy(self.spread).to(x.device))
        return ops.scatter(x, comm, -1)

    def mask(self, x: Tensor, comm: Comm) -> Tensor:
        """``x`` with this rank's padded features zeroed, and so their gradients. The rank stays data."""
        if self.filled is None:
            return x
        mine = torch.from_numpy(self.filled).to(x.device).index_select(0, comm.position).squeeze(0)
        return x * mine.to(x.dtype)
