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


@dataclass(frozen=True, eq=False)
class Features:
    """Index tables of one cut, made by the constructor: asking the spec in each forward took 62 us at tp=32.

    Arrays and not tensors: a tensor made under inference_mode or while tracing is unfit for the next use.
    """

    size: int
    padded: bool
    order: NDArray[np.int64] | None
    """Where each feature stands once the ranks' features are side by side; None if in its own place."""
    held: NDArray[np.int64] | None
    """[ranks, features of one rank]: which feature each place holds, -1 where it is padding. None where the
    ranks hold runs of the features in their order, without padding."""

    @classmethod
    def of(cls, spec: ShardSpec, n: int) -> Features:
        """Of a spec of this dim alone."""
        (size,) = spec.shape
        if n == 1 or spec.dim is None or spec.contiguous(n):
            return cls(size, False, None, None)
        order = spec.gathered_index(n).numpy()
        in_order = np.array_equal(order, np.arange(size))
        return cls(size, spec.padded(n), None if in_order else order, spec.source_index(n).numpy())

    def restored(self, y: Tensor) -> Tensor:
        """The features in their unsharded order, without padding, once all ranks' are gathered."""
        if self.order is not None:
            return y.index_select(-1, torch.from_numpy(self.order).to(y.device))
        return y.narrow(-1, 0, self.size) if self.padded else y

    def scatter(self, x: Tensor, comm: Comm) -> Tensor:
        """This rank's features of the last dim. Padded places take any feature: ``mask`` clears them."""
        if self.held is not None:
            side_by_side = torch.from_numpy(self.held).flatten().clamp(min=0)
            x = x.index_select(-1, side_by_side.to(x.device))
        return ops.scatter(x, comm, -1)

    def mask(self, x: Tensor, comm: Comm) -> Tensor:
        """``x`` with this rank's padded features zeroed, and so their gradients. The rank stays data."""
        if self.held is None:
            return x
        mine = (torch.from_numpy(self.held) >= 0).to(x.device).index_select(0, comm.position).squeeze(0)
        return x * mine.to(x.dtype)
