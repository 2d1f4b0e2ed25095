"""Every layer under every option equals the plain torch module: forward and every gradient."""

from __future__ import annotations

import pytest
from helpers.rank_pool import RankPool
from helpers.tiers import tiers

from tpcore.layout.mesh import Mesh
from tpcore.testing import matrix, run_ranks

FULL = [(layer, tp, dtype, 1) for layer in matrix.AXES for tp in (1, 2, 4) for dtype in matrix.DTYPES]


def sampled(cases: list[matrix.Case], every: int) -> list[matrix.Case]:
    """One of ``every`` cases, where there are many. 7 divides no axis' length, so each value comes up."""
    return cases[:: every if len(cases) > 20 else 1]


@pytest.mark.parametrize(
    ("layer", "tp", "dtype", "every"),
    tiers(
        [(layer, tp, dtype, 7) for layer, tp, dtype, _ in FULL],
        [point for point in FULL if point[1:3] in ((2, "fp32"), (4, "bf16"))],
        FULL,
    ),
)
def test_equals_the_plain_module(layer: str, tp: int, dtype: str, every: int) -> None:
    some = sampled(matrix.cases(layer, dtype), every)
    matrix.report(run_ranks(Mesh({"dp": 1, "tp": tp}), lambda ctx: matrix.run(ctx, some)))


@pytest.mark.parametrize(("tp", "dtype"), tiers([(2, "fp32")], [(4, "bf16")]))
def test_equals_the_plain_module_on_processes(pool: RankPool, tp: int, dtype: str) -> None:
    some = [case for layer in matrix.AXES for case in sampled(matrix.cases(layer, dtype), 7)]
    matrix.report(pool.run(Mesh({"dp": 1, "tp": tp}), matrix.run, some, timeout=200.0))
