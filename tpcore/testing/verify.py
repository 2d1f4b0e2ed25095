"""What ``tpcore verify`` runs on every rank: the checks of the kit on the job at hand, as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from .. import context
from ..agree import gather_bytes
from ..context import ParallelContext
from . import bodies, matrix


@dataclass
class Row:
    """One line: ``error`` is the one that came nearest to what is ``allowed``, over cases and ranks."""

    what: str
    dtype: str
    cases: int
    error: float
    allowed: float
    wrong: list[str]


def verify(backend: str | None, tp: int) -> list[Row]:
    """Start this rank and check everything; the same rows on every rank."""
    ctx = context.init(backend, tp=tp)
    try:
        return [_merged(ctx, row) for row in _rows(ctx)]
    finally:
        context.shutdown()


def _rows(ctx: ParallelContext) -> Iterator[Row]:
    can = ctx.backend.capabilities
    for primitive in bodies.PRIMITIVES:
        for dtype in can.dtypes:
            wrong = bodies.right_values(ctx, primitive, dtype)
            yield Row(primitive, str(dtype).removeprefix("torch."), len(bodies.SHAPES), 0.0, 0.0, wrong)
    for layer, axes in matrix.AXES.items():
        for name, dtype in matrix.DTYPES.items():
            if dtype in can.dtypes:
                for sequence in (False, True) if "seq" in axes else (False,):
                    yield _layer(ctx, layer, name, sequence)
    yield Row("training step", "float32", 2, 0.0, 0.0, bodies.training_step(ctx))
    yield Row(
        "random streams", "", 1, 0.0, 0.0, bodies.random_streams(ctx) if ctx.comm("tp").size > 1 else []
    )
    yield Row("checkpoint round trip", "float32", 1, 0.0, 0.0, bodies.checkpoint_round_trip(ctx))


def _layer(ctx: ParallelContext, layer: str, dtype: str, sequence: bool) -> Row:
    some = [
        case for case in matrix.cases(layer, dtype) if (dict(case.options).get("seq") is not None) == sequence
    ]
    some = some[:: 7 if len(some) > 20 else 1]
    found = [matrix.findings_of(ctx, case) for case in some]
    error, allowed = max((f.worst for f in found), key=lambda w: w[0] / max(w[1], 1e-300))
    name = f"{layer}, sequence parallel" if sequence else layer
    kind = str(matrix.DTYPES[dtype]).removeprefix("torch.")
    return Row(name, kind, len(some), error, allowed, [m for f in found for m in f.messages])


def _merged(ctx: ParallelContext, row: Row) -> Row:
    if ctx.world.size == 1:
        return row
    heard = [Row(**json.loads(t)) for t in gather_bytes(json.dumps(asdict(row)).encode(), ctx.world)]
    worst = max(heard, key=lambda r: r.error / max(r.allowed, 1e-300))
    row.error, row.allowed = worst.error, worst.allowed
    row.wrong = [message for r in heard for message in r.wrong]
    return row


def on_rank(backend: str | None, tp: int) -> list[Row]:
    """For a process that was started for this alone."""
    torch.set_num_threads(1)
    return verify(backend, tp)
