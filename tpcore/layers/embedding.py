"""Embedding sharded by vocabulary or by embedding dimension."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..layout.shard import ShardSpec
from ..private import is_wrapped, recorded, unwrapped
from .adopt import checked_plain, filled
from .blocks import check_divides
from .features import Features, check_tokens_dim, cut_features, tokens_over
from .fused import leave
from .initial import Init
from .module import Device, ParallelModule


def exporting() -> bool:
    """Whether torch.export traces."""
    ask = getattr(torch.compiler, "is_exporting", None)  # torch 2.7
    return bool(ask and ask())


def check_ids(ids: Tensor, size: int, what: str, ignore: int | None = None, *, read: bool = True) -> None:
    """Raise IndexError if an id is outside ``range(size)`` and not ``ignore``. It reads values; where a graph is
    made, and without ``read``, it is an assertion in the graph or the device's queue: a RuntimeError."""
    if not read or exporting() or recorded(ids):
        if ids.is_meta:
            return
        fits = ids.clamp(0, size - 1) == ids
        fits = fits if ignore is None else fits | (ids == ignore)
        torch._assert_async(fits.all(), f"{what}: an id does not fit a vocabulary of {size}")
        return
    while is_wrapped(ids):  # vmap reads no values
        ids = unwrapped(ids)
    bounds = _beyond(ids, size)
    if bounds and ignore is not None:
        bounds = _beyond(ids.masked_fill(ids == ignore, 0), size)
    if bounds:
        ignored = "" if ignore is None else f" (ignore_index={ignore})"
        raise IndexError(f"{what}: ids from {bounds[0]} to {bounds[1]} do not fit a vocabulary of {size}{ignored}")


def _beyond(ids: Tensor, size: int) -> tuple[int, int] | None:
    """The least and the largest id, unless all are in ``range(size)``."""
    if not ids.numel():
        return None
    low, high = (int(v) for v in torch.aminmax(ids))
    return (low, high) if low < 0 or high >= size else None


def own_places(ids: Tensor, width: int, comm: Comm) -> tuple[Tensor, Tensor]:
    """The place of each id among the ``width`` of this rank, or one near it, and whether it is there. In few operators:
    on some devices each costs as much as a small matmul."""
    place = torch.sub(ids, comm.position if ids.ndim else comm.position[0], alpha=width)
    own = place.clamp(0, width - 1)
    return own, own == place


Embedding = TypeVar("Embedding", bound="ParallelEmbedding")


class ParallelEmbedding(ParallelModule):
    """``nn.Embedding`` sharded over the tp group, with its initial values for the same seed.

    Input: int ids of any shape, the same on every rank. Output ``[*ids.shape, embedding_dim]``, the same
    on every rank (with sequence parallelism this rank's chunk of the tokens). By default each rank holds some rows of
    the table and looks up the ids in its rows; the outputs are summed over the ranks.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        padding_idx: a row of zeros without gradient.
        max_norm: looked-up rows are scaled to this norm, in place; the attribute ``norm_type`` is its p, 2.0.
        scale_grad_by_freq: divide a row's gradient by the number of its ids.
        sparse: sparse gradients.
        init_method: fills the unsharded table in place.
        device: where to allocate; "meta" allocates nothing.
        dtype: of the table. None is torch's default.
        shard_across_embedding: each rank holds some columns of every row.
        pad: allow a size that tp does not divide.
        sequence_dim: the dim of the output along which its tokens are spread over the ranks. A table sharded over
            pipeline stages too has tokens spread over its other axes.
        group: as in ``ColumnParallelLinear``.

    IndexError on every rank for an id out of range, on backends that can read values. ValueError for
    ``sparse`` on backends without sparse tensors.
    """

    plain_type = nn.Embedding
    weight: Tensor
    norm_type = 2.0
    collect_output = True
    """False: the output is this rank's partial sums or columns, without a collective."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        *,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Init | None = None,
        device: Device = None,
        dtype: torch.dtype | None = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_dim: int | None = None,
        group: Any = None,
    ) -> None:
        super().__init__(group)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx={padding_idx} is outside a vocabulary of {num_embeddings}")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm, self.scale_grad_by_freq, self.sparse = max_norm, scale_grad_by_freq, sparse
        self.shard_across_embedding, self.sequence_dim = shard_across_embedding, sequence_dim
        self.tokens = tokens_over(self, sequence_dim)
        if sparse and not self.tp.eager:
            raise ValueError("ParallelEmbedding(sparse=True): this backend's devices have no sparse tensors")
        cut = cut_features(self, "embedding_dim" if shard_across_embedding else "num_embeddings", 1, pad)
        check_divides(self, cut)
        self.features = Features.of(cut if shard_across_embedding else ShardSpec((embedding_dim,)), self.tp.size)
        self._clears_padding = init_method is None
        spec = ShardSpec((num_embeddings, embedding_dim), int(shard_across_embedding))
        self.shard_parameter("weight", spec, init_method or nn.init.normal_, dtype, device)
        self._clear_padding()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._clear_padding()

    @classmethod
    def from_plain(cls: type[Embedding], plain: nn.Module, **options: Any) -> Embedding:
        """This rank's part of an ``nn.Embedding``. Works like ``ColumnParallelLinear.from_plain``."""
        table = checked_plain(plain, nn.Embedding, cls)
        names = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
        arguments = {name: getattr(table, name) for name in names}
        layer = cls(**arguments, dtype=table.weight.dtype, device="meta", init_method=None, **options)
        layer.norm_type = table.norm_type
        return filled(layer, plain)

    @torch.no_grad()
    def _clear_padding(self) -> None:
        """Zero the row of ``padding_idx``, unless an init method was given. Not part of the init, which would then need
        the full table in memory. Uses a mask, so that ranks with and without the row run the same program."""
        row = self.padding_idx
        if row is None or not self._clears_padding:
            return
        if self.shard_across_embedding:
            self.weight[row] = 0
            return
        rows = self.shard_specs["weight"].source_index(self.tp.size)[self._tp_rank]
        self.weight.masked_fill_((rows == row).unsqueeze(1).to(self.weight.device), 0)

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.eager:
            check_ids(ids, self.num_embeddings, "ParallelEmbedding", read=self.tp.reads_are_cheap)
            self.look_alike_first("the ids", ids)
        check_tokens_dim(self, self.sequence_dim, ids.ndim + 1)
        if self.max_norm is not None:
            self._renormalize(ids)
        y = self._columns(ids) if self.shard_across_embedding else self._rows(ids)
        return y if self.sequence_dim is None else self.as_part(y, self.sequence_dim, "tokens")

    @property
    def sides(self) -> tuple[Features | None, Features | None]:
        return None, None if self.collect_output else self.features

    def _rows(self, ids: Tensor) -> Tensor:
        local, here = self._local_rows(ids)
        y = F.embedding(local, self.weight, sparse=self.sparse)
        y = self._gradient(y, ids) * here.unsqueeze(-1)
        if not self.collect_output:
            return y
        # one rank adds a value and the others add zeros, so the sum needs no wider dtype
        return leave(y, (self.tp, self.sequence_dim, None)) if self.tokens is None else self.tokens.summed(y)

    def _columns(self, ids: Tensor) -> Tensor:
        y = self._gradient(F.embedding(ids, self.weight, sparse=self.sparse), ids)
        if not self.collect_output:
            return self.features.mask(y, self.tp)
        y = self.features.gathered(y, self.tp)
        if self.sequence_dim is None:
            return y
        return ops.scatter(y, self.tp if self.tokens is None else self.tokens.over, self.sequence_dim)

    def _local_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """For each id its row in this rank's shard, or one near it, and whether this rank has the row."""
        return own_places(ids, self.weight.shape[0], self.tp)

    def _gradient(self, y: Tensor, ids: Tensor) -> Tensor:
        """``y`` with its gradient scaled as ``padding_idx`` and ``scale_grad_by_freq`` require."""
        if (self.padding_idx is None and not self.scale_grad_by_freq) or not y.requires_grad:
            return y
        if self.scale_grad_by_freq:
            counts = torch.zeros(self.num_embeddings, dtype=torch.float32, device=ids.device)
            counts = counts.scatter_add(0, ids.flatten(), torch.ones_like(ids, dtype=torch.float32).flatten())
            y = y.detach() + (y - y.detach()) / counts[ids].to(y.dtype).unsqueeze(-1)  # the same values
        if self.padding_idx is not None:
            y = torch.where((ids != self.padding_idx).unsqueeze(-1), y, y.detach())
        return y

    @torch.no_grad()
    def _renormalize(self, ids: Tensor) -> None:
        """Scale looked-up rows to a norm of at most ``max_norm``, in place, as nn.Embedding does."""
        p = self.norm_type
        norms = self.weight.norm(p, dim=1)
        if self.shard_across_embedding:
            if p == float("inf"):
                norms = self.tp.all_reduce(norms, "max")
            else:
                norms = self.tp.all_reduce(norms.pow(p)).pow(1 / p)
            local, here = ids, torch.ones_like(ids, dtype=torch.bool)
        else:
            local, here = self._local_rows(ids)
        looked_up = torch.zeros_like(norms).scatter_reduce(0, local.flatten(), here.flatten().to(norms.dtype), "amax")
        scale = torch.where((norms > self.max_norm) & (looked_up > 0), self.max_norm / (norms + 1e-7), 1.0)
        self.weight.mul_(scale.unsqueeze(1))

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {self._shapes()}"
