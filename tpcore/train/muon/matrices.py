"""Whole matrices out of the ranks' parts: each is orthogonalized by one rank, its owner, and goes back in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.comm import Comm
from ...layers.sharding import sharding
from ...layout.mesh import DATA
from ...layout.shard import ShardSpec
from ...runtime.context import current
from ..zero.chunk import ParameterChunk, chunk_of

ROUND = 64 * 2**20
"""Bytes of whole matrices that an owner has at a time, or one matrix."""


class NewtonSchulz(NamedTuple):
    """The quintic iteration of Muon, which takes all singular values near one (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon/). The numbers are those of ``torch.optim.Muon``, bit for bit."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    dtype: torch.dtype

    def __call__(self, matrix: Tensor) -> Tensor:
        """``matrix`` has this dtype already."""
        a, b, c = self.coefficients
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
        x: Tensor = wide / wide.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x if wide is matrix else x.mT


class Home(NamedTuple):
    """Where the matrices of a parameter are: one, or a stack of one for each expert. Parameters of equal homes travel
    together, dealt out to ``copies`` and then to ``shards``."""

    spec: ShardSpec  # of one matrix
    shards: Comm | None  # the ranks that have the other parts of it
    copies: Comm  # the ranks that have the same part, or of a Zero1 its other chunks
    local: tuple[int, ...]  # the shape of this rank's part of the parameter
    length: int | None  # of a chunk
    device: torch.device

    @property
    def owners(self) -> int:
        return self.copies.size * (1 if self.shards is None else self.shards.size)

    def rounds(self, parts: Sequence[Tensor], itemsize: int) -> Iterator[Sequence[Tensor]]:
        """Parts of parameters, some at a time, so that an owner has few whole matrices."""
        stack = prod(self.local[:-2])
        whole = stack * prod(self.spec.shape) * itemsize // (self.owners // self.copies.size)
        step = self.copies.size * max(1, ROUND // max(1, whole), self.owners // self.copies.size // max(1, stack))
        for start in range(0, len(parts), step):
            yield parts[start : start + step]

    def orthogonalized(self, parts: Sequence[Tensor], by: NewtonSchulz) -> Iterator[Tensor]:
        """The parts of the orthogonalized matrices. Collective over ``copies`` and ``shards``."""
        for some in self.rounds(parts, by.dtype.itemsize):
            yield from self._round(torch.stack([part.reshape(-1).to(by.dtype) for part in some]), by)

    def _round(self, x: Tensor, by: NewtonSchulz) -> Tensor:
        rows, copies = len(x), self.copies
        if self.length is None:
            matrices = x.view(-1, *self.local[-2:])
            local = self._through_shards(copies.split(_filled(matrices, copies.size), 0), by)
            return copies.all_gather(local, 0)[: len(matrices)].reshape(rows, *self.local)
        mine = copies.all_to_all(_filled(x, copies.size), 0, 1)[:, : prod(self.local)]
        local = self._through_shards(mine.reshape(-1, *self.local[-2:]), by).reshape(len(mine), -1)
        local = torch.nn.functional.pad(local, (0, self.length * copies.size - local.shape[1]))
        return copies.all_to_all(local, 1, 0)[:rows]

    def _through_shards(self, local: Tensor, by: NewtonSchulz) -> Tensor:
        """Of ``[matrices, rows, columns]``, this rank's parts, which belong to the owners of one copy."""
        if self.shards is None:
            return torch.stack([by(matrix) for matrix in local]) if len(local) else local
        n, spec = self.shards.size, self.spec
        parts = self.shards.all_to_all(_filled(local, n).unsqueeze(0), 1, 0)
        owned = [by(spec.unshard(list(of_matrix))) for of_matrix in parts.unbind(1)]
        back = torch.stack([torch.stack([spec.shard(matrix, rank, n) for matrix in owned]) for rank in range(n)])
        return self.shards.all_to_all(back, 0, 1)[0, : len(local)]


def _filled(x: Tensor, n: int) -> Tensor:
    """With rows of zeros, so that ``n`` ranks have as many."""
    return x if not (-len(x) % n) else torch.cat([x, x.new_zeros(-len(x) % n, *x.shape[1:])])


def home_of(p: Tensor, name: str, *, blocks: bool) -> Home:
    """``p``: a parameter, or the chunk of one that a Zero1 steps. ``blocks``: this rank's part counts as a whole."""
    chunk: ParameterChunk | None = chunk_of(p)
    parameter = p if chunk is None else chunk.parameter
    ctx, mark, local = current(), sharding(parameter), tuple(parameter.shape)
    cuts = []
    if mark is not None:
        if mark.local_shape != local:
            raise ValueError(
                f"parameter {name} has shape {local}, and its layout {mark.layout} gives this rank {mark.local_shape}: "
                "which part of the matrix it is is not known. Make the optimizer after what shards the model"
            )
        stacked = len(local) - 2  # a stack is divided in whole matrices
        cuts = [cut for cut in mark.layout.cuts if (cut.spec.dim or 0) >= stacked and cut.degree(mark.ctx.mesh) > 1]
    if len(cuts) > 1:
        raise ValueError(
            f"parameter {name} is sharded as {mark and mark.layout}, more than once, and Muon puts matrices together "
            'over one sharding: give it to AdamW, or to "blocks", by rule='
        )
    shards, spec = None, ShardSpec(local[-2:])
    if cuts and mark is not None and not blocks:
        first, of = len(local) - 2, cuts[0].spec
        spec, shards = ShardSpec(of.shape[first:], (of.dim or 0) - first, of.blocks), mark.ctx.comm(*cuts[0].axes)
    if chunk is not None:
        return Home(spec, shards, chunk.dp, local, chunk.length, parameter.device)
    cut_over = () if mark is None else [axis for cut in mark.layout.cuts for axis in cut.axes]
    # a group of a program's own may have tp ranks, and its context's mesh does not say which
    dealt = (*DATA, "tp") if ctx.mesh.axes.keys() >= {*cut_over} else DATA
    copies = ctx.comm(*(axis for axis in ctx.mesh.present(dealt) if axis not in cut_over))
    return Home(spec, shards, copies, local, None, parameter.device)
