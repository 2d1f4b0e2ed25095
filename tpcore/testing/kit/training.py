"""The conformance kit's check of training: a small BERT, cut over tp, takes two steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...runtime.context import ParallelContext
from .collectives import Trial, check
from .samples import multiple

VOCAB, HEAD, LAYERS, LENGTH, BATCH = 101, 8, 2, 16, 4
STEPS, RATE, MAX_NORM = 2, 0.5, 1.0


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mixed = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (-1, HEAD)) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads))
        x = self.norms[0](x + self.mixed(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = self.norms[1](x + self.down(F.gelu(self.up(x))))
        return out


class _Bert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(LAYERS))
        self.decoder = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.decoder(x)
        return logits


def _plain_bert(ctx: ParallelContext) -> _Bert:
    torch.manual_seed(0)
    return _Bert(HEAD * multiple(ctx.comm("tp").size))


def _sharded_bert(ctx: ParallelContext) -> nn.Module:
    """The layers that tp shards are replaced by layers with this rank's part of the values."""
    model = _plain_bert(ctx)
    for name, module in list(model.named_modules()):
        owner, _, last = name.rpartition(".")
        if last in ("query", "key", "value", "up", "decoder"):
            sharded: nn.Module = tpcore.ColumnParallelLinear.from_plain(module, gather_output=False, pad=True)
        elif last in ("mixed", "down"):
            sharded = tpcore.RowParallelLinear.from_plain(module, input_is_parallel=True)
        elif last == "words":
            sharded = tpcore.ParallelEmbedding.from_plain(module, pad=True)
        else:
            continue
        setattr(model.get_submodule(owner), last, sharded)
    return tpcore.layers.move_model_to_device(model, ctx.device)


@check
def training_steps(t: Trial) -> None:
    """A failure here alone is in dp combined with tp: mean of gradients, clipping, the step. Allowed is eight times the
    plain model's own error in float32, or eight roundings of the largest number or step."""
    ctx = t.ctx
    same, model = _plain_bert(ctx), _sharded_bert(ctx)
    exact = _plain_bert(ctx).double()
    ids = torch.randint(VOCAB, (BATCH * ctx.batch.size, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(ctx.batch.size)[ctx.index(ctx.batch)].to(ctx.device)
    for step in range(STEPS):
        want, own = (_plain_step(m, ids) for m in (exact, same))
        loss = tpcore.parallel_cross_entropy(model(mine), mine, vocab_size=VOCAB).mean()
        loss.backward()
        tpcore.reduce_gradients(model)
        norm = tpcore.clip_grad_norm(model, MAX_NORM)
        _descend(model)
        ctx.backend.mark_step()
        mean = ctx.batch.all_reduce(loss.detach().reshape(1)) / ctx.batch.size
        for what, got, *others in (
            ("loss", mean, want[0], own[0]),
            ("gradient norm", norm.reshape(1), want[1], own[1]),
        ):
            _compare(t, f"{what} of step {step}", got, *others)
    specs, rank = tpcore.layers.shard_specs(model), ctx.coord("tp")
    for name, p in model.named_parameters():
        parts = [specs[name].shard(m.get_parameter(name).detach(), rank, t.size) for m in (exact, same)]
        _compare(t, f"{name} after {STEPS} steps", p, *parts)


def _compare(t: Trial, what: str, got: Tensor, exact: Tensor, own: Tensor) -> None:
    exact = exact.double()
    u = torch.finfo(torch.float32).eps * max(RATE * MAX_NORM, float(exact.abs().max()))
    t.found.measure(f"BERT: {what}", got, exact, 8 * max(float((own.double() - exact).abs().max()), u))


def _plain_step(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    _descend(model)
    return loss.detach().reshape(1), norm.reshape(1)


@torch.no_grad()
def _descend(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.sub_(p.grad, alpha=RATE)
            p.grad = None
