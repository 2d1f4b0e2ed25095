"""Models to trace, plain and parallel, and a way to trace and run them without starting processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers.rank_pool import RankPool
from torch import Tensor, nn

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.trace import TensorParallelModel
from tpcore.trace.api import call_of, elements_of
from tpcore.trace.artifact import opened
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
    assert [(k, t.shape) for k, t in got.items()] == [(k, t.shape) for k, t in want.items()]
    return max(float((got[k] - want[k]).abs().max()) for k in want)


def error_of(model: Any, rows: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> float:
    """By how much the outputs of a traced Encoder differ from those of the plain one."""
    ids, mask = batch(rows, length)
    plain = Encoder(False, seed, dtype=dtype).eval().requires_grad_(False)
    return differences(model(ids, mask), plain(ids, mask))


# -- in the processes of the pool ---------------------------------------------------------------------------


Calls = Sequence[tuple[int, list[Tensor]]]
"""Programs and their inputs."""
Answers = list[list[Tensor]]


class Answering:
    """Answers for ``Workers``: ``run`` returns what each rank does to calls. State lasts as long as a run."""

    def __init__(self, folder: Path, run: Callable[[Calls], list[Answers]]) -> None:
        self.weights, self._run, self.running = folder, run, True

    def call(self, program: int, inputs: Sequence[Tensor], timeout: float | None) -> list[Tensor]:
        return self._run([(program, list(inputs))])[0][0]


def traced_by(
    trace: Callable[[Order], list[Traced]],
    run: Callable[[Calls], list[Answers]],
    folder: Path,
    func: Callable[[], Any],
    inputs: Any,
    tp: int,
    backend: str = "cpu_gloo",
    *,
    dynamic_shapes: Any = None,
    bucket_inputs: Sequence[Any] = (),
    pad_value: Any = 0,
) -> TensorParallelModel:
    calls = sorted((call_of(e) for e in (inputs, *bucket_inputs)), key=elements_of)
    order = Order(func, calls, dynamic_shapes, backend, tp, folder, "traced")
    manifest = assembled(order, trace(order), pad_value)
    model = TensorParallelModel(folder, manifest)
    model._workers = Answering(folder, run)  # type: ignore[assignment]
    return model


def _run(ctx: ParallelContext, folder: Path, calls: Calls) -> Answers:
    rank = Rank(ctx, folder, opened(folder), folder)
    return [[t.clone() for t in rank.run(program, inputs)] for program, inputs in calls]


def run_ranks_of(pool: RankPool, model: TensorParallelModel, calls: Sequence[tuple[Tensor, ...]]) -> list[Answers]:
    """What every rank returns to each of these calls, made one after another."""
    mesh = Mesh({"pp": 1, "dp": 1, "tp": model.tp_degree})
    return pool.run(mesh, _run, model.folder, [(0, list(c)) for c in calls])


def _trace(ctx: ParallelContext, order: Order) -> Traced:
    return Tracer(order, ctx).trace()


def traced_in(
    pool: RankPool, folder: Path, func: Callable[[], Any], inputs: Any, tp: int, **options: Any
) -> TensorParallelModel:
    mesh = Mesh({"pp": 1, "dp": 1, "tp": tp})
    trace, run = partial(pool.run, mesh, _trace), partial(pool.run, mesh, _run, folder)
    return traced_by(trace, run, folder, func, inputs, tp, **options)
