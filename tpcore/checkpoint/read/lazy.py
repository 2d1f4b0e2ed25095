"""Shards that are made only when they are written, so that one needs memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...layout.mesh import Mesh
from ..storage.files import CHUNK
from ..tensors.stored import Cut, Job, Stored, within

ONE = Mesh({"tp": 1})


@dataclass(frozen=True)
class Lazy:
    """The part of a stored tensor for ``rank`` of ``mesh``, as a ``Writable``."""

    stored: Stored
    rank: int = 0
    mesh: Mesh = ONE

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.local_shape(None, self.mesh)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def cut(self) -> Cut:
        return self.stored.cut

    def pieces(self) -> Iterator[Tensor]:
        """Rows of about a chunk: glibc's allocator reuses blocks of that size, but not larger ones."""
        parts, covered = self.stored.parts(None, self.rank, self.mesh)
        for shard in dict.fromkeys(shard for shard, _ in parts):
            shard.verify()
        shape, size = self.shape, self.dtype.itemsize
        rows = shape[0] if shape else 1
        step = max(1, CHUNK // max(1, math.prod(shape[1:]) * size))
        for start in range(0, rows, step):
            out = torch.empty((min(step, rows - start), *shape[1:]), dtype=self.dtype)
            out = out if shape else out[0]
            at = (start, *(0 for _ in shape[1:])) if shape else ()
            Job(out, within(parts, at, out.shape), covered).run(check=False)
            yield out


def once(model: Mapping[str, Stored], path: str) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Each tensor of the model, unsharded, by its first name; and for each further name of a tied tensor,
    its first name."""
    first: dict[object, str] = {}
    tensors: dict[str, Lazy] = {}
    ties: dict[str, str] = {}
    for name, stored in model.items():
        kept = first.setdefault((stored.first.identity, stored.cut), name)
        if kept == name:
            stored.whole()  # raises before anything is written
            tensors[name] = Lazy(stored)
        else:
            ties[name] = kept
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors of a model")
    return tensors, ties
