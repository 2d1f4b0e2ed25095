"""vLLM's ``WeightSource`` of a sharded model, which its trainer engines send in their four phases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import base  # type: ignore[import-not-found, unused-ignore]

from tpcore.layers.sharding import sharding
from tpcore.layout.layout import Layout
from tpcore.layout.mesh import Mesh
from tpcore.layout.shard import ShardSpec
from tpcore.runtime.context import current

from .load.gathered import Gathered
from .load.source import WeightSource

__all__ = ["VllmSource"]


class VllmSource(base.WeightSource):  # type: ignore[misc, unused-ignore]
    """Made on every rank, for ``WeightTransferTrainerFactory.trainer_init(..., source=VllmSource(model))``.

    ``iter_full`` gives whole tensors, one at a time. ``iter_local`` gives parts that lie as ``torch.chunk`` divides,
    and others whole: padded ones, grouped key heads, experts that files have apart.

    Made collectively over pipeline stages.

    Args:
        model: of transformers, on a mesh. Adapters of a ``PeftModel`` are merged on the way.
        dtype: of the floating tensors, by default the model's.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self._source, self._mesh = WeightSource(model, dtype=dtype), current().mesh
        self._chunks = self._chunked()
        self._metas = self._told()

    @cached_property
    def metadata(self) -> list[base.ParamMeta]:
        return self._metas

    def _told(self) -> list[base.ParamMeta]:
        metas = []
        for info in self._source.metadata():
            where = self._chunks.get(info.name)
            placed = {} if where is None else {"owners": tuple(range(self._mesh.size)), "placements": self._at(*where)}
            shape = {} if where is None else {"mesh_shape": tuple(self._mesh.axes.values())}
            metas.append(base.ParamMeta(*info, **placed, **shape))
        return metas

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: each rank takes all."""
        yield from self._source

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: ranks take the others whole."""
        device = current().device
        for name, entry in self._source.tensors().items():
            if name in self._chunks and isinstance(entry, Gathered) and entry.tensor is not None:
                with entry.merged():
                    part = entry.tensor.detach().to(entry.dtype, copy=True)
                yield name, part
            else:
                yield name, torch.cat(list(entry.pieces())).to(device) if entry.shape else next(iter(entry.pieces()))

    def _chunked(self) -> dict[str, tuple[str, int]]:
        """The axis and the dim of each tensor whose parts are even chunks, the same on all ranks."""
        if self._mesh.axes.get("pp", 1) > 1:  # a stage's ranks know their own tensors alone
            return {}
        entries = self._source.tensors().items()
        found = {name: _chunk(e.tensor, self._mesh) for name, e in entries if isinstance(e, Gathered)}
        return {name: where for name, where in found.items() if where is not None}

    def _at(self, axis: str, dim: int) -> tuple[base.Placement, ...]:
        return tuple(base.Shard(dim) if name == axis else base.Replicate() for name in self._mesh.axes)


def _chunk(tensor: Tensor | None, mesh: Mesh) -> tuple[str, int] | None:
    mark = None if tensor is None else sharding(tensor)
    if mark is None or len(mark.layout.cuts) != 1 or len(mark.layout.axes_on(mesh)) != 1 or mark.layout.padded(mesh):
        return None
    axis, dim = mark.layout.axes_on(mesh)[0], mark.layout.spec.dim
    even = Layout.of(ShardSpec(mark.layout.shape, dim), axis)
    same = all(mark.layout.boxes(rank, mesh) == even.boxes(rank, mesh) for rank in range(mesh.size))
    return (axis, dim) if same and dim is not None else None
