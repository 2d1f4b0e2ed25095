"""Models to trace, plain and parallel, and a way to trace and run them without starting processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rank_pool import RankPool
from torch import Tensor, nn

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.trace import TensorParallelModel
from tpcore.trace.api import _call, _size
from tpcore.trace.artifact import TraceManifest
from tpcore.trace.make.tracing import Order, Traced, Tracer, assembled
from tpcore.trace.serve.worker import Rank

VOCABULARY = 30


class Encoder(nn.Module):
    """Embedding and head cut by vocabulary and tied, attention by heads, a buffer that is not saved."""

    def __init__(self, parallel: bool, seed: int = 0, hidden: int = 16, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        kind: dict[str, Any] = {"dtype": dtype}
        column: Callable[..., nn.Module] = tpcore.ColumnParallelLinear if parallel else nn.Linear
        row: Callable[..., nn.Module] = tpcore.RowParallelLinear if parallel else nn.Linear
        inside = {"gather_output": False} if parallel else {}
        taking = {"input_is_parallel": True} if parallel else {}
        table = tpcore.ParallelEmbedding if parallel else nn.Embedding
        self.heads, self.hidden = 4, hidden
        self.words = table(VOCABULARY, hidden, **kind, **({"pad": True} if parallel else {}))
        self.places = nn.Embedding(64, hidden, **kind)
        self.query, self.key, self.value = (column(hidden, hidden, **inside, **kind) for _ in range(3))
        self.out = row(hidden, hidden, **taking, **kind)
        self.norm = nn.LayerNorm(hidden, **kind)
        self.up = column(hidden, 4 * hidden, **inside, **kind)
        self.down = row(4 * hidden, hidden, **taking, **kind)
        self.head = column(hidden, VOCABULARY, **kind, **({"pad": True} if parallel else {}))
        self.head.weight = self.words.weight
        self.register_buffer("positions", torch.arange(64), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.words(ids) + self.places(self.positions[: ids.shape[1]])
        q, k, v = (
            p(x).unflatten(-1, (-1, self.hidden // self.heads)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        allowed = None if mask is None else (mask > 0)[:, None, None, :]
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = self.norm(x + self.out(a.transpose(1, 2).flatten(2)))
        x = x + self.down(F.gelu(self.up(x)))
        return {"logits": self.head(x) * scale, "hidden": x}


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids, and a mask that leaves out the end of all rows but the first."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    kept = length - torch.arange(rows).clamp(max=length - 1)
    return ids, (torch.arange(length) < kept[:, None]).long()


DYNAMIC = {0: torch.export.Dim("rows", min=1, max=8), 1: torch.export.Dim("length", min=2, max=64)}


def differences(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    assert list(got) == list(want)
    return max(float((got[k] - want[k]).abs().max()) for k in want)


# -- in the processes of the pool ---------------------------------------------------------------------------


class InPool:
    """Answers for ``Workers``, with the ranks of the pool: their state lasts as long as one ``session``."""

    def __init__(self, pool: RankPool, folder: Path, manifest: TraceManifest) -> None:
        self._pool, self._folder, self._manifest, self.weights = pool, folder, manifest, folder
        self.running, self.failed = True, False
        self.seconds: list[float] = []

    def call(self, program: int, inputs: Sequence[Tensor], timeout: float | None) -> list[Tensor]:
        mesh = Mesh({"pp": 1, "dp": 1, "tp": self._manifest.tp})
        every = self._pool.run(mesh, _run, self._folder, self._manifest, [(program, list(inputs))])
        return every[0][0]

    def close(self) -> None:
        self.running = False


def _run(
    ctx: ParallelContext, folder: Path, manifest: TraceManifest, calls: Sequence[tuple[int, list[Tensor]]]
) -> list[list[Tensor]]:
    rank = Rank(ctx, folder, manifest, folder)
    return [[t.clone() for t in rank.run(program, inputs)] for program, inputs in calls]


def run_ranks_of(
    pool: RankPool, model: TensorParallelModel, calls: Sequence[tuple[Tensor, ...]]
) -> list[list[list[Tensor]]]:
    """What every rank returns to each of these calls, made one after another."""
    mesh = Mesh({"pp": 1, "dp": 1, "tp": model.tp_degree})
    return pool.run(mesh, _run, model.folder, model.manifest, [(0, list(c)) for c in calls])


def _trace(ctx: ParallelContext, order: Order) -> Traced:
    return Tracer(order, ctx).trace()


def traced_in(
    pool: RankPool,
    folder: Path,
    func: Callable[[], Any],
    inputs: Any,
    tp: int,
    *,
    dynamic_shapes: Any = None,
    bucket_inputs: Sequence[Any] = (),
    pad_value: Any = 0,
) -> TensorParallelModel:
    calls = sorted((_call(e) for e in (inputs, *bucket_inputs)), key=_size)
    order = Order(func, calls, dynamic_shapes, "cpu_gloo", tp, folder, "traced")
    ranks = pool.run(Mesh({"pp": 1, "dp": 1, "tp": tp}), _trace, order)
    manifest = assembled(order, ranks, pad_value)
    return TensorParallelModel(folder, manifest, workers=InPool(pool, folder, manifest))
