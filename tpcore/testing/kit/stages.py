"""The conformance kit's check of pipelines: two stages train as the plain module does."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...comm.transport import Transport
from ...comm.wrapper import DelegatingTransport
from ...layers.sharding import sharding
from ...layout.mesh import Mesh
from ...runtime.context import ParallelContext
from .collectives import Trial, check
from .programs import NEAR

WIDTH, INNER, LAYERS, MICROBATCHES, BATCH = 8, 24, 2, 4, 8


def stages_mesh(mesh: Mesh) -> Mesh | None:
    """Two stages of the ranks of ``mesh``; None if their number is odd."""
    dp, tp = mesh.axes.get("dp", 1), mesh.axes.get("tp", 1)
    if tp % 2 == 0:
        return Mesh({"pp": 2, "dp": dp, "tp": tp // 2})
    return Mesh({"pp": 2, "dp": dp // 2, "tp": tp}) if dp % 2 == 0 else None


class _Block(nn.Module):
    """``up`` and ``down`` of a residual MLP behind a norm that all ranks have whole."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), up, down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class _Model(nn.Module):
    def __init__(self, head: nn.Module, blocks: list[_Block]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x).square().mean()
        return out


def _plain() -> _Model:
    torch.manual_seed(7)
    blocks = [_Block(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)) for _ in range(LAYERS)]
    return _Model(nn.Linear(WIDTH, INNER), blocks)


def _cut(ctx: ParallelContext) -> _Model:
    """The same values: blocks over tp, the head over the ranks of both axes."""
    model, every = _plain(), ctx.comm("pp", "tp")
    blocks: Any = model.layers
    for block in blocks:
        block.up = tpcore.ColumnParallelLinear.from_plain(block.up, gather_output=False, pad=True)
        block.down = tpcore.RowParallelLinear.from_plain(block.down, input_is_parallel=True, pad=True)
    head: Any = model.head
    model.head = tpcore.ColumnParallelLinear.from_plain(head, pad=True, group=every)
    model.layers = tpcore.PipelinedLayers(model.layers, MICROBATCHES)  # type: ignore[assignment]
    tpcore.layers.move_model_to_device(model, ctx.device)
    return model


class Least(DelegatingTransport):
    """A transport with the three primitives that a backend must write; the others are their defaults."""

    broadcast = Transport.broadcast
    all_to_all = Transport.all_to_all
    permute = Transport.permute


@check
def pipeline_step(t: Trial) -> None:
    """A failure here alone is in pp combined with tp: ``permute``, or its default, in backward or between layers."""
    ctx, plain, pp = t.ctx, _plain(), t.ctx.comm("pp")
    batch = torch.randn(BATCH * ctx.batch.size, WIDTH, generator=torch.Generator().manual_seed(3))
    want = plain(batch)
    want.backward()
    mine = batch.chunk(ctx.batch.size)[ctx.index(ctx.batch)].to(ctx.device)
    for engine, run in {"layers": _by_layers, "engine": _by_engine}.items():
        for how, transport in {"": pp.transport, " with the default permute": Least(pp.transport)}.items():
            with pp.traced(pp.position, transport):
                model = _cut(ctx)
                loss = run(model, mine)
                tpcore.reduce_gradients(model)
            mean = ctx.batch.all_reduce(loss.detach().reshape(1)) / ctx.batch.size
            t.found.measure(f"loss by the {engine}{how}", mean, want.detach().reshape(1), NEAR)
            _compare(t, f"by the {engine}{how}", model, plain)


def _by_layers(model: _Model, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    loss.backward()
    return loss


def _by_engine(model: _Model, x: Tensor) -> Tensor:
    return tpcore.PipelineModel(model, MICROBATCHES).run_train(x)


def _compare(t: Trial, how: str, model: _Model, plain: _Model) -> None:
    for name, p in model.named_parameters():
        whole, mark = plain.get_parameter(name).grad, sharding(p)
        if whole is None or p.grad is None:
            t.found.append(f"{name} has no gradient {how}")
            continue
        part = whole if mark is None else mark.layout.shard(whole, t.ctx.rank, t.ctx.mesh)
        t.found.measure(f"gradient of {name} {how}", p.grad, part, NEAR)
    t.ctx.backend.mark_step()
