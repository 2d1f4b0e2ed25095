"""The conformance kit's checks of whole programs: random streams, settings, checkpoints and traces."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tpcore

from ...backend.interface import DynamicDim, Function
from ...errors import BackendError
from ...layout.shard import ShardSpec
from ...runtime.consensus import gather_bytes
from ...runtime.context import ParallelContext
from .rank import RankCheck, Wrong, check
from .training import LENGTH, VOCAB, Bert, sharded_bert

NEAR = 2e-5
"""float32 through two layers of width 32: some tens of roundings of numbers about 3."""


@check
def random_streams(t: RankCheck) -> None:
    """A failure is in ``manual_seed``, ``get_rng_state`` or ``set_rng_state``: replicated draws are equal over tp,
    sharded draws differ, and a restored state repeats both."""
    tpcore.random.manual_seed(11)
    state = tpcore.random.get_state()

    def draw() -> Tensor:
        return F.dropout(torch.ones(64, device=t.ctx.device))

    def sharded() -> Tensor:
        with tpcore.random.sharded():
            return draw()

    first = [draw(), sharded(), draw()]
    tpcore.random.set_state(state)
    again = [draw(), sharded(), draw()]
    t.wrong.measure("what a restored random state draws again", torch.stack(again), torch.stack(first))
    alike = [[torch.equal(r, x) for r in t.comm.all_gather(x.unsqueeze(0), 0)] for x in first]
    t.expect(all(alike[0] + alike[2]), "replicated dropout differs between tp ranks,")
    t.expect(sum(alike[1]) == 1, "sharded dropout is the same on two tp ranks,")
    t.expect(not torch.equal(first[0], first[2]), "the generator does not advance")
    live = t.ctx.backend.get_rng_state()
    kept = live.clone()
    draw()
    t.ctx.backend.get_rng_state()
    t.expect(torch.equal(live, kept), "a saved random state changes when numbers are drawn")
    for seed in (11 + (1 << 8), 11 + (1 << 16)):
        tpcore.random.manual_seed(seed)
        t.expect(not torch.equal(draw(), first[0]), f"the seeds 11 and {seed} give the same numbers")


def full_float32(ctx: ParallelContext) -> Wrong:
    """A failure is in a setting: float32 matmuls take fewer bits, as TF32 does, and so will the layers' tests."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # from torch 2.9 on, whichever way it was set
        set_to = {name: getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")}
    else:
        set_to = {"float32": torch.get_float32_matmul_precision()}
    low = [f"of {name} it is {how!r}" for name, how in set_to.items() if how not in ("none", "ieee", "highest")]
    remedy = 'call torch.set_float32_matmul_precision("highest"), and unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE'
    what = f"the precision of float32 matmuls is lowered on rank {ctx.rank}: {', '.join(low)}: {remedy}"
    return Wrong([what] if low else [])


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


@check
def checkpoint_round_trip(t: RankCheck) -> None:
    """A failure is in gathering bytes, or in ``device``: loaded values differ from the saved ones."""
    net, other = (sharded_bert(t.ctx) for _ in range(2))
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(-1.0)
    with _shared_folder(t.ctx) as folder:
        tpcore.checkpoint.save(net.state_dict(), folder / "saved")
        tpcore.checkpoint.load(folder / "saved", model=other)
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        t.wrong.measure(f"{name} as it was read back", b, a)


class _Example:
    """A network to trace, cut and plain, with the same weights, and its inputs."""

    def __init__(self, ctx: ParallelContext) -> None:
        self.ctx = ctx
        self.plain, self.net = Bert(ctx).eval(), sharded_bert(ctx).eval()
        dynamic = ctx.backend.capabilities.dynamic_shapes
        self.dims = {0: DynamicDim("batch", 1, 8)} if dynamic else {}
        self.batches = (2, 1, 8) if dynamic else (2,)

    def ids(self, batch: int, first: int) -> Tensor:
        return ((torch.arange(batch * LENGTH).view(batch, LENGTH) * 3 + first) % VOCAB).to(self.ctx.device)

    def wanted(self, ids: Tensor) -> list[Tensor]:
        """The plain network's outputs, of the second this rank's part."""
        hidden, logits = self.plain(ids.cpu())
        cut = ShardSpec(tuple(logits.shape), 2)
        return [hidden, cut.shard(logits, self.ctx.coord("tp"), self.ctx.comm("tp").size)]

    def run(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.func.functional_call(self.net, dict(weights), tuple(inputs)))

    def ranks_differ(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        return [inputs[0] + self.ctx.coord("tp")]

    def trace(self, fn: Function, folder: Path) -> None:
        self.ctx.backend.trace(fn, self.net.state_dict(), [self.ids(2, 0)], [self.dims], folder)


@check
def traced_program(t: RankCheck) -> None:
    """A failure is in ``trace`` or ``load_program``: other weights, values and, where declared, sizes, what later calls
    do to earlier outputs, not refusing a model that needs a program for each rank; without declared tracing, in not
    refusing it."""
    example = _Example(t.ctx)
    with _shared_folder(t.ctx) as folder, torch.no_grad():
        if not t.ctx.backend.capabilities.tracing:
            _refused(t, example, example.run, folder, "tracing, which is not declared,")
            return
        for name in ("model", "refused"):
            (folder / name).mkdir(exist_ok=True)
        example.trace(example.run, folder / "model")
        gather_bytes(b"", t.ctx.world)  # until rank 0 has written
        _measure_program(t, example, folder / "model")
        if t.size > 1:
            _refused(t, example, example.ranks_differ, folder / "refused", "a model that reads the rank in Python")


def _refused(t: RankCheck, example: _Example, fn: Function, folder: Path, what: str) -> None:
    try:
        example.trace(fn, folder)
    except BackendError:
        return
    t.expect(False, f"{what} was not refused")


def _measure_program(t: RankCheck, example: _Example, folder: Path) -> None:
    """Compare the program in ``folder`` with the plain network."""
    weights = {name: x.detach().clone() for name, x in example.net.state_dict().items()}
    program = t.ctx.backend.load_program(folder, weights)
    earlier = program([example.ids(2, 0)])
    copies = [x.detach().cpu().clone() for x in earlier]
    for change in ("as traced", "with its weights changed in place"):
        for batch, first in itertools.product(example.batches, (0, 1)):
            ids = example.ids(batch, first)
            what = f"the traced model at batch {batch}, {change}, on rank {t.ctx.rank}"
            for part, got, want in zip(("", ", its part"), program([ids]), example.wanted(ids), strict=True):
                t.wrong.measure(what + part, got, want, NEAR)
        for x in (*weights.values(), *example.plain.parameters()):
            x.mul_(0.5)
    for got, copy in zip(earlier, copies, strict=True):
        t.wrong.measure(f"an output on rank {t.ctx.rank} after later calls", got, copy)
