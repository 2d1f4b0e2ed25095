"""Parameters with parts that several ranks hold, such as key heads if tp exceeds their number."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..layout.shard import ShardSpec
from .module import ParallelModule


@dataclass(frozen=True)
class Copies:
    """Sums the gradients of a parameter's replicated runs over the ranks that hold them.

    Each rank computes with its own copy and gets only part of the gradient. Without the sum, the copies would
    differ after the first step.
    """

    runs: tuple[tuple[int, Comm | None], ...]  # along the cut dim: length, and the ranks to sum over
    dtype: torch.dtype  # lowest precision for the sum

    @classmethod
    def of(cls, cut: ShardSpec, layer: ParallelModule, dtype: torch.dtype) -> Copies | None:
        """The copies in ``layer``, or None if there are none. ``cut``: the spec of its cut dim alone."""
        n = layer.tp.size
        copies = cut.block_copies(n)
        if max(copies, default=1) == 1:
            return None
        lengths = [ShardSpec((block.size,), 0, (block,)).local_shape(n)[0] for block in cut.blocks]
        runs = []
        # adjacent blocks with the same number of copies (k and v) share one collective
        for count, blocks in groupby(zip(copies, lengths, strict=True), key=lambda block: block[0]):
            comm = None if count == 1 else layer.comm_within(count)
            runs.append((sum(length for _, length in blocks), comm))
        return cls(tuple(runs), dtype)

    def __call__(self, parameter: Tensor, dim: int) -> Tensor:
        """``parameter``, cut along ``dim``, for use in a forward. Backward sums the gradients."""
        parts = parameter.split([length for length, _ in self.runs], dim)
        used = [
            part if comm is None else ops.copy(part, comm, dtype=self.dtype)
            for part, (_, comm) in zip(parts, self.runs, strict=True)
        ]
        return used[0] if len(used) == 1 else torch.cat(used, dim)
