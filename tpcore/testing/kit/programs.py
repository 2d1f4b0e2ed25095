"""The conformance kit's checks of whole programs: training, random streams, checkpoints and traces."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

from ...backend.interface import DynamicDim, Function
from ...layout.shard import ShardSpec
from ...runtime.consensus import gather_bytes
from ...runtime.context import ParallelContext
from .collectives import Wrong, not_refused
from .samples import multiple


def _plain(ctx: ParallelContext) -> nn.Sequential:
    torch.manual_seed(5)
    inner = multiple(ctx.comm("tp").size, 12)
    return nn.Sequential(nn.Linear(8, inner), nn.GELU(), nn.Linear(inner, 8))


def _sharded(ctx: ParallelContext) -> nn.Module:
    up, activation, down = _plain(ctx)
    net = nn.Sequential(
        tpcore.ColumnParallelLinear.from_plain(up, gather_output=False),
        activation,
        tpcore.RowParallelLinear.from_plain(down, input_is_parallel=True),
    )
    return net.to(ctx.device)


NEAR = 2e-5
"""float32 through two layers of width 12: some tens of roundings of 6e-8 each."""


def training_step(ctx: ParallelContext) -> Wrong:
    """Two steps of SGD with dp, tp and clipping equal those of the plain module on the whole batch."""
    batch = torch.randn(multiple(ctx.batch.size, 8), 8, generator=torch.Generator().manual_seed(3))
    plain, net = _plain(ctx), _sharded(ctx)
    sgd, plain_sgd = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (net, plain))
    out = Wrong()
    mine = batch.chunk(ctx.batch.size)[ctx.index(ctx.batch)].to(ctx.device)
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
    specs, n, r = tpcore.layers.shard_specs(net), ctx.comm("tp").size, ctx.coord("tp")
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
    live = ctx.backend.get_rng_state()
    kept = live.clone()
    draw()
    ctx.backend.get_rng_state()
    if not torch.equal(live, kept):
        out.append("a saved random state changes when numbers are drawn")
    for seed in (11 + (1 << 8), 11 + (1 << 16)):
        tpcore.random.manual_seed(seed)
        if torch.equal(draw(), first[0]):
            out.append(f"the seeds 11 and {seed} give the same numbers")
    return out


@contextmanager
def _shared_folder(ctx: ParallelContext) -> Iterator[Path]:
    """A folder that all ranks share, removed when all have left the block."""
    made = tempfile.mkdtemp(prefix="tpcore-kit-") if ctx.rank == 0 else ""
    try:
        yield Path(gather_bytes(made.encode(), ctx.world)[0].decode())
        gather_bytes(b"", ctx.world)  # until all have left
    finally:
        if ctx.rank == 0:
            shutil.rmtree(made)


def checkpoint_round_trip(ctx: ParallelContext) -> Wrong:
    """A saved model loads bit for bit."""
    out = Wrong()
    net, other = (_sharded(ctx) for _ in range(2))
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(-1.0)
    with _shared_folder(ctx) as folder:
        tpcore.checkpoint.save(net.state_dict(), folder / "saved")
        tpcore.checkpoint.load(folder / "saved", model=other)
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        out.measure(f"{name} as it was read back", b, a)
    return out


class _Network(nn.Sequential):
    """Returns its output, and that of layer 3, of which a rank of a cut network has a part."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, found = ids, []
        for layer in self:
            x = layer(x)
            found.append(x)
        return x, found[3]


def _plain_network() -> _Network:
    """With values that a network has after training: no bias is zero and no norm is one."""
    network = _Network(
        nn.Embedding(10, 8),
        nn.Flatten(0, 1),  # a shape that depends on the batch
        nn.LayerNorm(8),
        nn.Linear(8, 12),
        nn.GELU(),
        nn.Linear(12, 8),
        nn.Linear(8, 6),
    )
    torch.manual_seed(5)
    network.load_state_dict({name: torch.randn_like(t) / 2 for name, t in network.state_dict().items()})
    return network


def _sharded_network(ctx: ParallelContext) -> nn.Module:
    words, flat, norm, up, activation, down, head = _plain_network()
    return _Network(
        tpcore.ParallelEmbedding.from_plain(words, pad=True),
        flat,
        norm,
        tpcore.ColumnParallelLinear.from_plain(up, gather_output=False, pad=True),
        activation,
        tpcore.RowParallelLinear.from_plain(down, input_is_parallel=True, pad=True),
        tpcore.ColumnParallelLinear.from_plain(head, pad=True),
    ).to(ctx.device)


class _Example:
    """A network to trace, cut and plain, with the same weights, and its inputs."""

    def __init__(self, ctx: ParallelContext) -> None:
        self.ctx = ctx
        self.plain, self.net = _plain_network(), _sharded_network(ctx)
        dynamic = ctx.backend.capabilities.dynamic_shapes
        self.dims = {0: DynamicDim("batch", 1, 8)} if dynamic else {}
        self.batches = (2, 1, 8) if dynamic else (2,)

    def ids(self, batch: int, first: int) -> Tensor:
        return ((torch.arange(batch * 5).view(batch, 5) * 3 + first) % 10).to(self.ctx.device)

    def wanted(self, ids: Tensor) -> list[Tensor]:
        """The plain network's outputs, of the second this rank's part."""
        whole, hidden = self.plain(ids.cpu())
        cut = ShardSpec(tuple(hidden.shape), 1)
        return [whole, cut.shard(hidden, self.ctx.coord("tp"), self.ctx.comm("tp").size)]

    def run(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.func.functional_call(self.net, dict(weights), tuple(inputs)))

    def ranks_differ(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [inputs[0] + self.ctx.coord("tp")]

    def trace(self, fn: Function, folder: Path) -> None:
        self.ctx.backend.trace(fn, self.net.state_dict(), [self.ids(2, 0)], [self.dims], folder)


def traced_program(ctx: ParallelContext) -> Wrong:
    """A traced model equals the model on every rank, also with other weights, other values and, where declared,
    other sizes; later calls leave earlier outputs as they are. All ranks refuse a model that needs a program for
    each rank, and a backend without declared tracing refuses to trace."""
    example, out = _Example(ctx), Wrong()
    with _shared_folder(ctx) as folder, torch.no_grad():
        if not ctx.backend.capabilities.tracing:
            out += not_refused(lambda: example.trace(example.run, folder), "tracing, which is not declared,")
            return out
        places = [folder / "model", folder / "refused"]
        for place in places:
            place.mkdir(exist_ok=True)
        example.trace(example.run, places[0])
        gather_bytes(b"", ctx.world)  # until rank 0 has written
        _measure_program(example, places[0], out)
        if ctx.comm("tp").size > 1:
            what = "a model that reads the rank in Python"
            out += not_refused(lambda: example.trace(example.ranks_differ, places[1]), what)
    return out


def _measure_program(example: _Example, folder: Path, out: Wrong) -> None:
    """Compare the program in ``folder`` with the plain network."""
    weights = {name: t.detach().clone() for name, t in example.net.state_dict().items()}
    program = example.ctx.backend.load_program(folder, weights)
    earlier = program([example.ids(2, 0)])
    copies = [t.detach().cpu().clone() for t in earlier]
    for change in ("as traced", "with its weights changed in place"):
        for batch, first in itertools.product(example.batches, (0, 1)):
            ids = example.ids(batch, first)
            what = f"the traced model at batch {batch}, {change}, on rank {example.ctx.rank}"
            for part, got, want in zip(("", ", its part"), program([ids]), example.wanted(ids), strict=True):
                out.measure(what + part, got, want, NEAR)
        for t in (*weights.values(), *example.plain.parameters()):
            t.mul_(0.5)
    for got, copy in zip(earlier, copies, strict=True):
        out.measure(f"an output on rank {example.ctx.rank} after later calls", got, copy)
