"""A small BERT, cut over tp and trained for two steps: the last check of ``tpcore verify``."""

from __future__ import annotations

import re
from collections import OrderedDict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...layers.module import ParallelModule
from ...runtime.context import ParallelContext
from ..kit.collectives import Wrong

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 101, 32, 4, 2, 16, 4
STEPS, RATE, MAX_NORM = 2, 0.5, 1.0

COLUMN = re.compile(r"\.(query|key|value|intermediate\.dense|decoder)$")
ROW = re.compile(r"\.output\.dense$")


def title() -> str:
    return "BERT step" if find_spec("transformers") else "BERT step, without transformers"


def plain_bert() -> Any:
    """The unsharded model: transformers' or, without transformers, one with the same structure and names."""
    torch.manual_seed(0)
    if not find_spec("transformers"):
        return _Bert()
    transformers = import_module("transformers")  # an optional dependency
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=False,  # so that no parameter has two names
    )
    return transformers.BertForMaskedLM(config)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 4 * WIDTH)})
        self.attention = nn.ModuleDict({"output": nn.Sequential(OrderedDict(dense=nn.Linear(WIDTH, WIDTH)))})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * WIDTH, WIDTH)})
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.num_attention_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (self.num_attention_heads, -1)) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads))
        x = self.norms[0](x + self.attention["output"](mixed.transpose(1, 2).flatten(2)))
        wide = F.gelu(self.intermediate["dense"](x))
        out: Tensor = self.norms[1](x + self.output["dense"](wide))
        return out


class _Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(VOCAB, WIDTH)})
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.head = nn.ModuleDict({"decoder": nn.Linear(WIDTH, VOCAB)})

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embeddings["word_embeddings"](input_ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head["decoder"](x)}


def cut_bert(model: Any, ctx: ParallelContext) -> Any:
    """Replace the layers that tp cuts, in place, by layers with this rank's part of the values."""
    for name, old in list(model.named_modules()):
        new: ParallelModule | None = None
        if COLUMN.search(name):
            new = tpcore.ColumnParallelLinear.from_plain(old, gather_output=False, pad=True)
        elif ROW.search(name):
            new = tpcore.RowParallelLinear.from_plain(old, input_is_parallel=True)
        elif name.endswith("word_embeddings"):
            new = tpcore.ParallelEmbedding.from_plain(old, pad=True)
        if new is not None:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, new)
        for size in ("num_attention_heads", "all_head_size"):
            if hasattr(old, size):
                setattr(old, size, getattr(old, size) // ctx.comm("tp").size)
    return model


def training_steps(ctx: ParallelContext) -> Wrong:
    """Compare two steps of SGD with dp, tp and clipping (loss, gradient norm, every parameter) with the plain
    model in float64 on the CPU. Allowed is eight times the plain model's own error in float32, which another
    order of the same sums does not exceed, or eight roundings of the largest number or step."""
    out = Wrong()
    if HEADS % ctx.comm("tp").size:
        return out
    exact, same = plain_bert().double(), plain_bert()
    model = tpcore.layers.move_model_to_device(cut_bert(plain_bert(), ctx), ctx.device)
    ids = torch.randint(VOCAB, (BATCH * ctx.batch.size, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(ctx.batch.size)[ctx.index(ctx.batch)].to(ctx.device)
    specs = tpcore.layers.shard_specs(model)
    for step in range(STEPS):
        wanted, own = (_plain_step(m, ids) for m in (exact, same))
        loss = tpcore.parallel_cross_entropy(_logits(model, mine), mine, vocab_size=VOCAB).mean()
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


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids)["logits"]
    return logits


def _plain_step(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(_logits(model, ids).flatten(0, 1), ids.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    _descend(model)
    return loss.detach().reshape(1), norm.reshape(1)


def _stepped(model: Any, ctx: ParallelContext) -> Tensor:
    tpcore.reduce_gradients(model)
    norm = tpcore.clip_grad_norm(model, MAX_NORM)
    _descend(model)
    ctx.backend.mark_step()
    return norm


@torch.no_grad()
def _descend(model: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.sub_(p.grad, alpha=RATE)
            p.grad = None
