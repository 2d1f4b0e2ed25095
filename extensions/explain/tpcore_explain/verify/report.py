"""The work of ``tpcore verify`` on every rank: the kit's checks on this job, as rows of a table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import tpcore
from tpcore.backend.interface import Backend
from tpcore.layout.mesh import Mesh
from tpcore.runtime.consensus import gather
from tpcore.runtime.context import ParallelContext, use
from tpcore.runtime.init import choose_backend, init, shutdown
from tpcore.testing import matrix
from tpcore.testing.kit import collectives as bodies
from tpcore.testing.kit import programs, training
from tpcore.testing.kit.contract import Contract
from tpcore.testing.kit.rank import Wrong
from tpcore.testing.kit.samples import LOST, lost_by


@dataclass
class Row:
    """One line of the table. ``error``: the largest relative to ``allowed``; if that is 0, bits are compared."""

    what: str
    dtype: str
    cases: int
    error: float
    allowed: float
    wrong: list[str]


@dataclass
class Report:
    """The report that ``tpcore verify`` saves."""

    backend: str
    mesh: dict[str, int]
    date: str  # UTC
    versions: dict[str, str]
    machine: str
    rows: list[Row]
    note: str = ""  # what a reader must know about the machine

    @property
    def wrong(self) -> list[str]:
        return [message for row in self.rows for message in row.wrong]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        fields = json.loads(text)
        return cls(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})


def on_rank(backend: str | None, tp: int) -> Report:
    """Start this rank, in a process only for it, and check everything; return the same report on every rank."""
    torch.set_num_threads(1)
    name = choose_backend(backend)
    ctx = init(name, tp=tp)
    try:
        return checked(ctx, name)
    finally:
        shutdown()


def checked(ctx: ParallelContext, backend: str, note: str = "") -> Report:
    """The report on this job of ``backend``."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    versions = {"tpcore": tpcore.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("transformers", "torch_xla"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    rows = [_merged(ctx, row) for row in _rows(ctx)]
    return Report(backend, dict(ctx.mesh.axes), now, versions, machine, rows, note)


def _rows(ctx: ParallelContext) -> Iterator[Row]:
    can = ctx.backend.capabilities
    loses = lost_by(ctx.device) if ctx.comm("tp").eager else LOST
    for primitive in bodies.PRIMITIVES:
        for dtype in can.dtypes:
            wrong = bodies.right_values(ctx, primitive, dtype, loses)
            yield _row(primitive, str(dtype).removeprefix("torch."), len(bodies.shapes(ctx.comm("tp").size)), wrong)
    yield from edge_rows(ctx)
    for layer, axes in matrix.AXES.items():
        for name, dtype in matrix.DTYPES.items():
            if dtype in can.dtypes:
                for sequence in (False, True) if "seq" in axes else (False,):
                    yield _layer(ctx, layer, name, sequence)
    two = training.stages_mesh(ctx.mesh)
    if two is not None:
        with use(ParallelContext(ctx.backend, two, ctx.rank)) as staged:
            yield _row("pipeline of 2 stages", "float32", 4, training.pipeline_steps(staged))
    if ctx.comm("tp").size > 1:
        yield _row("random streams", "float32", 3, programs.random_streams(ctx))
    yield _row("checkpoint round trip", "float32", 1, programs.checkpoint_round_trip(ctx))
    if can.tracing:
        yield _row("trace", "float32", 6, programs.traced_program(ctx))
    yield _row("BERT step", "float32", training.STEPS, training.training_steps(ctx))


_ELSEWHERE = {
    *("test_declaration", "test_there_are_ranks", "test_values", "test_moved_dtypes", "test_layers"),
    *("test_training", "test_pipeline", "test_random_streams", "test_checkpoint", "test_traces"),
    *("test_groups", "test_under_way_in_groups"),  # of other meshes than this job's
    "test_lost_ranks",  # in jobs of the kit's own
}
"""Tests of the kit that are not among the edges: most have rows of their own above."""


class _Edges(Contract):
    """The kit's tests on the ranks of this job, whatever mesh they ask for."""

    seed, one_in = 1, 10

    def __init__(self, ctx: ParallelContext) -> None:
        self._ctx, self.wrong = ctx, Wrong()
        self.loses = lost_by(ctx.device)  # type: ignore[misc]  # of this job

    def backend_class(self) -> type[Backend]:
        return type(self._ctx.backend)

    def run(self, mesh: Mesh, fn: Callable[..., Wrong], *args: Any) -> list[list[str]]:
        self.wrong += fn(self._ctx, *args)
        return []


EDGES = tuple(name for name in vars(Contract) if name.startswith("test_") and name not in _ELSEWHERE)


def edge_rows(ctx: ParallelContext, tests: Sequence[str] = EDGES) -> Iterator[Row]:
    """The collectives at the edges, a row a test. None on a lazy backend: each call would compile a program."""
    comm = ctx.comm("tp")
    if comm.size == 1 or not comm.eager:
        return
    for test in tests:
        edges = _Edges(ctx)
        for cases, arguments in enumerate(edges.cases(test, edges.run), 1):  # noqa: B007  the number of them
            getattr(edges, test)(**arguments)
        what = test.removeprefix("test_").replace("_", " ")
        yield _row(what, "float32", cases, edges.wrong)


def _row(what: str, dtype: str, cases: int, wrong: Wrong) -> Row:
    return Row(what, dtype, cases, wrong.error, wrong.allowed, list(wrong))


def _layer(ctx: ParallelContext, layer: str, dtype: str, sequence: bool) -> Row:
    some = [case for case in matrix.cases(layer, dtype) if (case.get("seq") is not None) == sequence]
    some = some[:: 7 if len(some) > 20 else 1]
    name = f"{layer}, sequence parallel" if sequence else layer
    kind = str(matrix.DTYPES[dtype]).removeprefix("torch.")
    return _row(name, kind, len(matrix.runnable(ctx, some)), matrix.run(ctx, some))


def _merged(ctx: ParallelContext, row: Row) -> Row:
    rows = [Row(**theirs) for theirs in gather(asdict(row), ctx.world)]
    worst = max(rows, key=lambda r: r.error / max(r.allowed, 1e-300))
    row.error, row.allowed = worst.error, worst.allowed
    row.wrong = [message for r in rows for message in r.wrong]
    return row
