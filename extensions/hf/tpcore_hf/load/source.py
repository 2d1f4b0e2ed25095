"""The whole tensors of a sharded model, made one at a time for an engine that serves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tpcore.layout.mesh import Mesh
from tpcore.layout.slices import narrowed
from tpcore.runtime.context import current

from .gathered import Written, whole_entries
from .names import in_files
from .shards import ShardPiece, ShardSource, state_of


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The tensors that ``save_pretrained`` would write of ``model``, whole, one after the other.

    ``metadata()`` tells them, and an iterator gives names and tensors, as often as one likes, with the values of that
    moment; ``tpcore_hf.vllm`` has the same as vLLM's own class. Each rank holds one whole tensor at a
    time; of experts that files have apart, those of one layer.

    Args:
        model: of transformers or of tpcore's layers, on any mesh. Adapters of a ``PeftModel`` are merged on the way,
            and the model stays as it is.
        dtype: of the floating tensors, converted before they are gathered; by default the model's.
        to: the only rank that is given them; others send it what it lacks, each byte once, and hold nothing whole. By
            default all ranks are given all.

    Raises:
        CheckpointError: files have a tensor merged with others; with ``to`` also one that is computed for its file.
        ValueError: ``to`` is no rank of the mesh.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None, to: int | None = None) -> None:
        if to is not None:
            current().mesh.coords(to)
        self.model = model
        self.dtype = dtype
        self.to = to

    def metadata(self) -> list[TensorInfo]:
        """Name, dtype and whole shape of each tensor, in the order of the iterator. Nothing is gathered. Collective
        over pipeline stages."""
        return [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in self.tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, on the model's device. Collective: each rank takes all, and those beside ``to`` are
        given none."""
        if self.to is not None:
            yield from self._sent(self.to)
            return
        device = current().device
        for name, t in self.tensors().items():
            pieces = list(t.pieces())
            yield name, (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(device)

    def _sent(self, to: int) -> Iterator[tuple[str, Tensor]]:
        """As to an engine of one rank."""
        ctx = current()
        shards = ShardSource(self.model, Mesh({"tp": 1}), {}, dtype=self.dtype)
        pieces = {name: [*of_name] for name, of_name in groupby(shards.pieces, lambda piece: piece.name)}
        mine = iter(shards)
        for name, dtype, shape in self.metadata():
            whole = torch.empty(shape if ctx.rank == to else 0, dtype=dtype, device=ctx.device)
            for piece in pieces.get(name, ()):  # none of a tensor without elements
                values = next(mine)[1] if piece.source == ctx.rank else _empty(piece)
                if piece.source != to:
                    targets = [to if rank == piece.source else None for rank in range(ctx.mesh.size)]
                    values = ctx.world.permute(values, targets)
                if ctx.rank == to:
                    narrowed(whole, piece.start, piece.size).copy_(values)
            if ctx.rank == to:
                yield name, whole

    def tensors(self) -> Mapping[str, Written]:
        """By their names in files, gathered when they are asked for their pieces. Collective over pipeline stages."""
        model, state, merges = state_of(self.model)
        entries = whole_entries(model, state, set(), self.dtype, merges, everywhere=True)
        if not hasattr(model, "all_tied_weights_keys"):  # no model of transformers
            return entries
        return in_files(model, entries)  # an error is of the names, and the same on each rank


def _empty(piece: ShardPiece) -> Tensor:
    return torch.empty(piece.size, dtype=piece.dtype, device=current().device)
