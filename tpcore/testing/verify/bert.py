"""A small BERT, cut over tp and trained for two steps: the last check of ``tpcore verify``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...runtime.context import ParallelContext
from ..kit.collectives import Wrong

VOCAB, WIDTH, INNER, HEADS, LAYERS, LENGTH, BATCH = 101, 32, 128, 4, 2, 16, 4
STEPS, RATE, MAX_NORM = 2, 0.5, 1.0

COLUMN, ROW = ("query", "key", "value", "up", "decoder"), ("mixed", "down")


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixed, self.up, self.down = (
            nn.Linear(*sizes) for sizes in ((WIDTH, WIDTH), (WIDTH, INNER), (INNER, WIDTH))
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads))
        x = self.norms[0](x + self.mixed(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = self.norms[1](x + self.down(F.gelu(self.up(x))))
        return out


class _Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.decoder = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.decoder(x)
        return logits


def plain_bert() -> _Bert:
    torch.manual_seed(0)
    return _Bert()


def sharded_bert() -> _Bert:
    """The layers that tp shards are replaced by layers with this rank's part of the values."""
    model = plain_bert()
    for name, module in list(model.named_modules()):
        owner, _, last = name.rpartition(".")
        if last in COLUMN:
            sharded: nn.Module = tpcore.ColumnParallelLinear.from_plain(module, gather_output=False, pad=True)
        elif last in ROW:
            sharded = tpcore.RowParallelLinear.from_plain(module, input_is_parallel=True)
        elif last == "words":
            sharded = tpcore.ParallelEmbedding.from_plain(module, pad=True)
        else:
            continue
        setattr(model.get_submodule(owner), last, sharded)
    return model


def training_steps(ctx: ParallelContext) -> Wrong:
    """Two steps of SGD with dp, tp and clipping against the plain model in float64. Allowed is eight times the plain
    model's own error in float32, or eight roundings of the largest number or step."""
    out = Wrong()
    if HEADS % ctx.comm("tp").size:
        return out
    exact, same = plain_bert().double(), plain_bert()
    model = tpcore.layers.move_model_to_device(sharded_bert(), ctx.device)
    ids = torch.randint(VOCAB, (BATCH * ctx.batch.size, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(ctx.batch.size)[ctx.index(ctx.batch)].to(ctx.device)
    specs = tpcore.layers.shard_specs(model)
    for step in range(STEPS):
        wanted, own = (_plain_step(m, ids) for m in (exact, same))
        loss = tpcore.parallel_cross_entropy(model(mine), mine, vocab_size=VOCAB).mean()
        loss.backward()
        norm = _stepped(model, ctx)
        mean = ctx.batch.all_reduce(loss.detach().reshape(1)) / ctx.batch.size
        for what, got, at in (("loss", mean, 0), ("gradient norm", norm.reshape(1), 1)):
            _compare(out, f"{what} of step {step}", got, wanted[at], own[at])
    full, plain = exact.state_dict(), same.state_dict()
    rank, n = ctx.coord("tp"), ctx.comm("tp").size
    for name, p in model.named_parameters():
        cut = [specs[name].shard(m[name].detach(), rank, n) for m in (full, plain)]
        _compare(out, f"{name} after {STEPS} steps", p, *cut)
    return out


def _compare(out: Wrong, what: str, got: Tensor, exact: Tensor, own: Tensor) -> None:
    exact = exact.double()
    u = torch.finfo(torch.float32).eps * max(RATE * MAX_NORM, float(exact.abs().max()))
    out.measure(f"BERT: {what}", got, exact, 8 * max(float((own.double() - exact).abs().max()), u))


def _plain_step(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    _descend(model)
    return loss.detach().reshape(1), norm.reshape(1)


def _stepped(model: nn.Module, ctx: ParallelContext) -> Tensor:
    tpcore.reduce_gradients(model)
    norm = tpcore.clip_grad_norm(model, MAX_NORM)
    _descend(model)
    ctx.backend.mark_step()
    return norm


@torch.no_grad()
def _descend(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.sub_(p.grad, alpha=RATE)
            p.grad = None
