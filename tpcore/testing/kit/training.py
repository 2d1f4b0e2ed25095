"""The conformance kit's checks of gradients: of each collective, and of steps of a small BERT over tp and in stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...comm import mappings as ops
from ...comm.comm import Comm
from ...comm.transport import PRIMITIVES, Transport
from ...comm.wrapper import DelegatingTransport
from ...layers.sharding import layouts
from ...layout.mesh import Mesh
from ...runtime.context import ParallelContext
from .collectives import shapes
from .rank import RankCheck, check
from .samples import multiple

Kind = Literal["replicated", "parts"]
MAPPINGS: dict[str, tuple[Callable[[Tensor, Comm], Tensor], Kind, Kind]] = {
    "copy": (ops.copy, "replicated", "parts"),
    "reduce": (ops.reduce, "parts", "replicated"),
    "scatter": (lambda x, c: ops.scatter(x, c, 1), "replicated", "parts"),
    "gather": (lambda x, c: ops.gather(x, c, 1), "parts", "replicated"),
    "all_gather": (lambda x, c: ops.all_gather(x, c, 1), "parts", "parts"),
    "reduce_scatter": (lambda x, c: ops.reduce_scatter(x, c, 1), "parts", "parts"),
    "all_to_all": (lambda x, c: ops.all_to_all(x, c, 1, 0), "parts", "parts"),
    "shift": (ops.shift, "parts", "parts"),
}
VOCAB, HEAD, LAYERS, LENGTH, BATCH = 101, 8, 2, 16, 4
STEPS, RATE, MAX_NORM = 2, 0.5, 1.0


@check
def transpose_law(t: RankCheck, name: str) -> None:
    """A failure here alone is in collectives made during backward: <f(x), y> == <x, f_T(y)>, replicated values once."""
    fn, source, target = MAPPINGS[name]
    x = _whole_numbers(t, shapes(t.size)[1], 1, source).requires_grad_()
    out = fn(x, t.comm)
    y = _whole_numbers(t, out.shape, 2, target)
    out.backward(y)
    if x.grad is None:
        t.wrong.append(f"{name}: no gradient")
        return
    _equal(t, name, _inner(t, out.detach(), y, target), _inner(t, x.detach(), x.grad, source))


@check
def primitive_law(t: RankCheck, name: str) -> None:
    """A failure here alone is in state that a primitive leaves for its transpose: <f(x), y> == <x, f_T(y)>."""
    primitive, n = PRIMITIVES[name], t.size
    values = {"dim": 1, "src": n - 1, "op": "sum", "donate": False, "split_dim": 1, "concat_dim": 0}
    values["to"] = (n - 1, *[-1] * (n - 1))
    arguments = {name: values[name] for name in primitive.arguments}
    x = _whole_numbers(t, shapes(n)[1], 1)
    out = getattr(t.comm, name)(x, **arguments)
    y = _whole_numbers(t, out.shape, 2)
    _equal(t, name, _inner(t, out, y), _inner(t, x, primitive.transpose(t.comm, y, *arguments.values())))


def _whole_numbers(t: RankCheck, shape: Sequence[int], seed: int, kind: Kind = "parts") -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * (t.me + 1) * (kind == "parts"))
    return torch.randint(-8, 9, tuple(shape), generator=generator).float().to(t.ctx.device)


def _inner(t: RankCheck, a: Tensor, b: Tensor, kind: Kind = "parts") -> float:
    mine = (a * b).sum().reshape(1)
    return float(mine if kind == "replicated" else t.comm.all_reduce(mine))


def _equal(t: RankCheck, name: str, left: float, right: float) -> None:
    t.expect(left == right, f"{name}: <f(x), y> is {left} and <x, f_T(y)> is {right}")


def stages_mesh(mesh: Mesh) -> Mesh | None:
    """Two stages of the ranks of ``mesh``; None if their number is odd."""
    dp, tp = mesh.axes.get("dp", 1), mesh.axes.get("tp", 1)
    if tp % 2 == 0:
        return Mesh({"pp": 2, "dp": dp, "tp": tp // 2})
    return Mesh({"pp": 2, "dp": dp // 2, "tp": tp}) if dp % 2 == 0 else None


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


class Bert(nn.Module):
    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEAD * multiple(ctx.comm("tp").size)
        self.words, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.layers: Any = nn.ModuleList(_Layer(width) for _ in range(LAYERS))
        self.decoder = nn.Linear(width, VOCAB)
        self.sharded, self.ends = False, ctx.comm("tp") if ctx.over_axis("pp") is None else ctx.comm("pp", "tp")
        for p in self.parameters():
            if p.ndim == 1:  # as after training, where no bias is 0 and no norm 1
                nn.init.uniform_(p, 0.5, 1.5)

    def forward(self, ids: Tensor) -> Any:
        """The loss; in eval mode the hidden states and the logits, of which a rank of a sharded model has a part."""
        x = self.words(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.decoder(x)
        if not self.training:
            return x, logits
        if self.sharded:
            return tpcore.parallel_cross_entropy(logits, ids, vocab_size=VOCAB, group=self.ends).mean()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def sharded_bert(ctx: ParallelContext) -> Bert:
    """The layers that tp shards are replaced by layers with this rank's part of the values."""
    model = Bert(ctx)
    for name, module in list(model.named_modules()):
        owner, _, last = name.rpartition(".")
        if last in ("query", "key", "value", "up", "decoder"):
            group = model.ends if last == "decoder" else None
            sharded: nn.Module = tpcore.ColumnParallelLinear.from_plain(
                module, gather_output=False, pad=True, group=group
            )
        elif last in ("mixed", "down"):
            sharded = tpcore.RowParallelLinear.from_plain(module, input_is_parallel=True)
        elif last == "words":
            sharded = tpcore.ParallelEmbedding.from_plain(module, pad=True, group=model.ends)
        else:
            continue
        setattr(model.get_submodule(owner), last, sharded)
    if ctx.over_axis("pp") is not None:
        model.layers = tpcore.PipelinedLayers(model.layers, BATCH)
    model.sharded = True
    tpcore.layers.move_model_to_device(model, ctx.device)
    return model


class Least(DelegatingTransport):
    """A transport with the three primitives that a backend must write; the others are their defaults."""

    broadcast = Transport.broadcast
    all_to_all = Transport.all_to_all
    permute = Transport.permute


@check
def training_steps(t: RankCheck) -> None:
    """A failure here alone is in dp combined with tp: mean of gradients, clipping, the step."""
    _equal_steps(t, "", _backward)


@check
def pipeline_steps(t: RankCheck) -> None:
    """A failure here alone is in pp combined with tp: ``permute``, or its default, in backward or between layers."""
    pp = t.ctx.comm("pp")

    def by_engine(model: Bert, ids: Tensor) -> Tensor:
        return tpcore.PipelineModel(model, BATCH).run_train(ids)

    for engine, run in {"layers": _backward, "engine": by_engine}.items():
        for how, transport in {"": pp.transport, " with the default permute": Least(pp.transport)}.items():
            with pp.traced(pp.position, transport):
                _equal_steps(t, f", by the {engine}{how}", run)


def _backward(model: Bert, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids)
    loss.backward()
    return loss.detach()


def _equal_steps(t: RankCheck, how: str, run: Callable[[Bert, Tensor], Tensor]) -> None:
    """Two steps of SGD with clipping equal the plain model's in float64. Allowed is eight times its own error in
    float32, or eight roundings of the largest number or step."""
    ctx = t.ctx
    exact, same, model = Bert(ctx).double(), Bert(ctx), sharded_bert(ctx)
    ids = torch.randint(VOCAB, (BATCH * ctx.batch.size, LENGTH), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(ctx.batch.size)[ctx.index(ctx.batch)].to(ctx.device)

    def compare(what: str, got: Tensor, want: Tensor, own: Tensor) -> None:
        want = want.double()
        u = torch.finfo(torch.float32).eps * max(RATE * MAX_NORM, float(want.abs().max()))
        t.wrong.measure(f"BERT: {what}{how}", got, want, 8 * max(float((own.double() - want).abs().max()), u))

    for step in range(STEPS):
        (loss, norm), (own_loss, own_norm) = (_plain_step(m, ids) for m in (exact, same))
        mean = ctx.batch.all_reduce(run(model, mine).reshape(1)) / ctx.batch.size
        tpcore.reduce_gradients(model)
        clipped = tpcore.clip_grad_norm(model, MAX_NORM)
        _descend(model)
        ctx.backend.mark_step()
        compare(f"loss of step {step}", mean, loss, own_loss)
        compare(f"gradient norm of step {step}", clipped.reshape(1), norm, own_norm)
    for name, layout in layouts(model).items():
        parts = [layout.shard(m.get_parameter(name).detach(), ctx.rank, ctx.mesh) for m in (exact, same)]
        compare(f"{name} after {STEPS} steps", model.get_parameter(name), *parts)


def _plain_step(model: Bert, ids: Tensor) -> tuple[Tensor, Tensor]:
    loss = _backward(model, ids)
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    _descend(model)
    return loss.reshape(1), norm.reshape(1)


@torch.no_grad()
def _descend(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.sub_(p.grad, alpha=RATE)
            p.grad = None
