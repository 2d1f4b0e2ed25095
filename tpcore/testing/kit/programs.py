"""The conformance kit's checks of whole programs: training, random streams, checkpoints and traces."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...backend.programs import DynamicDim, Function
from ...consensus import gather_bytes
from ...context import ParallelContext
from .collectives import Wrong, not_refused


def _net() -> nn.Module:
    return nn.Sequential(
        tpcore.ColumnParallelLinear(8, 12, gather_output=False),
        nn.GELU(),
        tpcore.RowParallelLinear(12, 8, input_is_parallel=True),
    )


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def _full_state() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return _plain().state_dict()


def _load(net: nn.Module, full: dict[str, Tensor], ctx: ParallelContext) -> nn.Module:
    specs, n, r = tpcore.shard_specs(net), ctx.comm("tp").size, ctx.coord("tp")
    net.load_state_dict({k: s.shard(full[k], r, n) for k, s in specs.items()})
    return net.to(ctx.device)


NEAR = 2e-5
"""float32 through two layers of width 12: some tens of roundings of 6e-8 each."""


def training_step(ctx: ParallelContext) -> Wrong:
    """Two steps of SGD with dp, tp and clipping equal those of the plain module on the whole batch."""
    full = _full_state()
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    plain, net = _plain(), _load(_net(), full, ctx)
    plain.load_state_dict(full)
    sgd, plain_sgd = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (net, plain))
    out = Wrong()
    dp = ctx.mesh.axes.get("dp", 1)
    mine = batch.chunk(dp)[ctx.coord("dp") if dp > 1 else 0].to(ctx.device)
    for step in range(2):
        for module, opt, x in ((net, sgd, mine), (plain, plain_sgd, batch)):
            opt.zero_grad()
            module(x).square().mean().mul(100).backward()
        tpcore.reduce_gradients(net)
        norm = tpcore.clip_grad_norm(net, 1.0)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        out.measure(f"gradient norm of step {step}", norm.cpu() / want, torch.tensor(1.0), NEAR)
        sgd.step()
        plain_sgd.step()
    specs, n, r = tpcore.shard_specs(net), ctx.comm("tp").size, ctx.coord("tp")
    for name, p in net.named_parameters():
        whole = plain.get_parameter(name).detach()
        out.measure(f"{name} after two steps", p, specs[name].shard(whole, r, n), NEAR)
    return out


def random_streams(ctx: ParallelContext) -> Wrong:
    """Replicated draws are equal over tp, sharded draws differ, and a restored state repeats both."""
    comm, out = ctx.comm("tp"), Wrong()
    tpcore.random.manual_seed(11)
    state = tpcore.random.get_state()

    def draw() -> Tensor:
        return F.dropout(torch.ones(64, device=ctx.device))

    def sharded() -> Tensor:
        with tpcore.random.sharded():
            return draw()

    first = [draw(), sharded(), draw()]
    tpcore.random.set_state(state)
    again = [draw(), sharded(), draw()]
    out.measure("what a restored random state draws again", torch.stack(again), torch.stack(first))
    alike = [torch.equal(r, x) for x in first for r in comm.all_gather(x.unsqueeze(0), 0)]
    n, me = comm.size, int(comm.position.cpu())
    if not all(alike[:n] + alike[2 * n :]):
        out.append("replicated dropout differs between tp ranks")
    if any(same for i, same in enumerate(alike[n : 2 * n]) if i != me):
        out.append("sharded dropout is the same on two tp ranks")
    if torch.equal(first[0], first[2]):
        out.append("the generator does not advance")
    return out


@contextmanager
def _shared_folder(ctx: ParallelContext) -> Iterator[Path]:
    """A folder that all ranks share, removed when all have left the block."""
    made = tempfile.mkdtemp(prefix="tpcore-kit-") if ctx.rank == 0 else ""
    try:
        yield Path(gather_bytes(made.encode(), ctx.world)[0].decode() if ctx.world.size > 1 else made)
        _wait_for_all(ctx)
    finally:
        if ctx.rank == 0:
            shutil.rmtree(made)


def _wait_for_all(ctx: ParallelContext) -> None:
    if ctx.world.size > 1:
        gather_bytes(b"", ctx.world)


def checkpoint_round_trip(ctx: ParallelContext) -> Wrong:
    """A saved model loads bit for bit."""
    out = Wrong()
    net, other = _load(_net(), _full_state(), ctx), _net().to(ctx.device)
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(-1.0)
    with _shared_folder(ctx) as folder:
        tpcore.checkpoint.save(net.state_dict(), folder / "saved")
        tpcore.checkpoint.load(folder / "saved", model=other)
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        out.measure(f"{name} as it was read back", b, a)
    return out


def _network(linear: Callable[..., nn.Module], embedding: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(
        embedding(10, 8),
        nn.Flatten(0, 1),  # a shape that depends on the batch
        nn.LayerNorm(8),
        linear(0, 8, 12),
        nn.GELU(),
        linear(1, 12, 8),
        linear(2, 8, 6),
    )


def _cut_linear(which: int, fan_in: int, fan_out: int) -> nn.Module:
    if which == 1:
        return tpcore.RowParallelLinear(fan_in, fan_out, input_is_parallel=True)
    return tpcore.ColumnParallelLinear(fan_in, fan_out, gather_output=which == 2, pad=True)


def traced_program(ctx: ParallelContext) -> Wrong:
    """A traced model equals the model on every rank, also with other weights, and with other batch sizes if
    dynamic shapes are declared. All ranks refuse a model that needs a program for each rank. A backend
    without declared tracing refuses to trace."""
    plain = _network(lambda _, *sizes: nn.Linear(*sizes), nn.Embedding)
    torch.manual_seed(5)
    full = {name: torch.randn_like(t) / 2 for name, t in plain.state_dict().items()}
    plain.load_state_dict(full)
    net = _load(_network(_cut_linear, partial(tpcore.ParallelEmbedding, pad=True)), full, ctx)

    dynamic = ctx.backend.capabilities.dynamic_shapes

    def run(weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.func.functional_call(net, dict(weights), tuple(inputs))]

    def ranks_differ(weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [inputs[0] + ctx.coord("tp")]

    def trace(fn: Function, folder: Path) -> None:
        dims = {0: DynamicDim("batch", 1, 8)} if dynamic else {}
        ctx.backend.trace(fn, net.state_dict(), [ids(2)], [dims], folder)

    def ids(batch: int) -> Tensor:
        return (torch.arange(batch * 5).view(batch, 5) * 3 % 10).to(ctx.device)

    out = Wrong()
    with _shared_folder(ctx) as folder, torch.no_grad():
        if not ctx.backend.capabilities.tracing:
            out += not_refused(lambda: trace(run, folder), "tracing, which is not declared,")
            return out
        places = [folder / "model", folder / "refused"]
        for place in places:
            place.mkdir(exist_ok=True)
        trace(run, places[0])
        _wait_for_all(ctx)  # rank 0 writes
        weights = {name: t.detach().clone() for name, t in net.state_dict().items()}
        program = ctx.backend.load_program(places[0], weights)
        for change in ("as traced", "with its weights changed in place"):
            for batch in (2, 1, 8) if dynamic else (2,):
                what = f"the traced model at batch {batch}, {change}, on rank {ctx.rank}"
                out.measure(what, program([ids(batch)])[0], plain(ids(batch).cpu()), NEAR)
            for t in (*weights.values(), *plain.parameters()):
                t.mul_(0.5)
        if ctx.comm("tp").size > 1:
            what = "a model that reads the rank in Python"
            out += not_refused(lambda: trace(ranks_differ, places[1]), what)
    return out
