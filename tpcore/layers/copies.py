"""Parameters of which several ranks hold the same part, such as key heads where tp is above their number."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from .. import ops
from ..comm import Comm
from ..shard import ShardSpec
from .module import ParallelModule


@dataclass(frozen=True)
class Copies:
    """Sums the gradients of a parameter's replicated runs over the ranks that hold the same.

    Each rank computes with its own copy and sees a part of its gradient. Without the sum the copies would
    drift apart in the first step.
    """

    runs: tuple[tuple[int, Comm | None], ...]  # along the cut dim: how long, and over which ranks to sum
    dtype: torch.dtype  # the least precision to sum in

    @classmethod
    def of(cls, cut: ShardSpec, layer: ParallelModule, dtype: torch.dtype) -> Copies | None:
        """Those of a layer whose features are cut as ``cut``, a spec of that dim alone; None without any."""
        n = layer.tp.size
        copies = cut.block_copies(n)
        if max(copies, default=1) == 1:
            return None
        lengths = [ShardSpec((block.size,), 0, (block,)).local_shape(n)[0] for block in cut.blocks]
        runs = []
        # neighbours with as many copies, k and v say, are summed by one collective
        for count, blocks in groupby(zip(copies, lengths, strict=True), key=lambda block: block[0]):
            comm = None if count == 1 else layer.comm_within(count)
            runs.append((sum(length for _, length in blocks), comm))
        return cls(tuple(runs), dtype)

    def __call__(self, parameter: Tensor, dim: int) -> Tensor:
        """``parameter``, cut along ``dim``, for use in a forward."""
        parts = parameter.split([length for length, _ in self.runs], dim)
        used = [
            part if comm is None else ops.copy(part, comm, dtype=self.dtype)
            for part, (_, comm) in zip(parts, self.runs, strict=True)
        ]
        return used[0] if len(used) == 1 else torch.cat(used, dim)
