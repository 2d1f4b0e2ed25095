"""A small language model, plain and as stages, and the laws that every pipeline of it is held to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm
from tpcore.layers.sharding import sharding
from tpcore.runtime.context import ParallelContext

VOCAB, WIDTH, SEQ = 24, 16, 4


class Block(nn.Module):
    """A layer norm that no parallel layer replaces, a causal mixing of tokens, an MLP."""

    tokens: Comm | None = None  # over which they lie, with sequence parallelism

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mix: Tensor, *, scale: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        h = mix @ h if self.tokens is None else ops.scatter(mix @ ops.gather(h, self.tokens, 1), self.tokens, 1)
        h = h if scale is None else h * scale
        return x + self.dropout(self.down(F.gelu(self.up(h))))


class Model(nn.Module):
    def __init__(self, layers: int, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")

    def forward(self, ids: Tensor, labels: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids))
        n = ids.shape[1]
        mix = torch.ones(n, n, dtype=x.dtype, device=x.device).tril() / n
        for layer in self.layers:
            x = layer(x, mix, scale=scale)
        return self.losses(self.head(self.norm(x)), labels).mean()


class CutModel(Model):
    """The same, cut: the vocabulary over stages and tp, the blocks over tp."""

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        over = ends_of(tpcore.current())
        return tpcore.parallel_cross_entropy(logits, labels, group=over)


def ends_of(ctx: ParallelContext) -> Comm:
    """Over which ranks embedding and head are sharded, at any number of stages."""
    return ctx.comm("pp", "tp")


def plain(layers: int, **options: Any) -> Model:
    torch.manual_seed(5)
    return Model(layers, **options).double()


def cut(
    layers: int, ctx: ParallelContext, *, tied: bool = False, dropout: float = 0.0, tokens: bool = False
) -> CutModel:
    """All layers, with tpcore's in them; which stage keeps which is for the caller to say. ``tokens``: with
    sequence parallelism over tp."""
    torch.manual_seed(5)
    model = CutModel(layers, tied=tied, dropout=dropout).double()
    on: dict[str, Any] = {}
    ends: dict[str, Any] = {"group": ends_of(ctx)}
    if tokens:
        on = {"sequence_dim": 1}
        ends |= on
    for block in model.layers:
        if tokens:
            block.tokens = ctx.comm("tp")
            block.norm = tpcore.LayerNorm.from_plain(block.norm, sequence_parallel=True)
        block.up = tpcore.ColumnParallelLinear.from_plain(block.up, gather_output=False, **on)
        block.down = tpcore.RowParallelLinear.from_plain(block.down, input_is_parallel=True, **on)
    if tokens:
        model.norm = tpcore.LayerNorm.from_plain(model.norm, sequence_parallel=True)
    model.embed = tpcore.ParallelEmbedding.from_plain(model.embed, **ends)
    model.head = tpcore.ColumnParallelLinear.from_plain(model.head, gather_output=False, **ends)
    if tied:
        model.head.weight = model.embed.weight
    return model


def batch_of(size: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (size, SEQ), generator=g)
    scale = 1 + 0.1 * torch.rand(size, 1, 1, generator=g, dtype=torch.float64)
    return {"ids": ids, "labels": ids.roll(-1, 1), "scale": scale}


ENGINES = ("recomputed", "kept", "lockstep")


def backward(model: nn.Module, engine: str, count: int, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a batch, and backward, by one of the ways to run the stages of ``model`` in microbatches."""
    if engine == "lockstep":
        return tpcore.PipelineModel(model, count).run_train(**batch)
    if not isinstance(model.layers, tpcore.PipelinedLayers):
        recompute = engine == "recomputed"
        model.layers = tpcore.PipelinedLayers(model.layers, count, recompute=recompute, shared=["mix"])
    loss: Tensor = model(**batch)
    loss.backward()
    return loss.detach()


def share_of(batch: dict[str, Tensor], ctx: ParallelContext) -> dict[str, Tensor]:
    """What this dp rank has of a batch."""
    return {k: v.chunk(ctx.mesh.axes["dp"])[ctx.coord("dp")] for k, v in batch.items()}


def part_of(full: Tensor, p: Tensor, ctx: ParallelContext) -> Tensor:
    """What this rank holds of ``full``, as ``p`` lies on the mesh."""
    found = sharding(p)
    return full if found is None else found.layout.shard(full, ctx.rank, ctx.mesh)


def assert_same_gradients(
    model: nn.Module, dense: nn.Module, ctx: ParallelContext, rtol: float = 1e-12, atol: float = 1e-12
) -> None:
    """Names are the unsharded model's; 1e-12: float64 through a few layers."""
    want = dict(dense.named_parameters())
    for name, p in model.named_parameters():
        if want[name].grad is None:  # routers' corrections, which no optimizer steps
            assert p.grad is None, name
            continue
        assert p.grad is not None, name
        torch.testing.assert_close(
            p.grad, part_of(want[name].grad, p, ctx), rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
