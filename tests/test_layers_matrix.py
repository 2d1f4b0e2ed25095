"""Every layer under every option equals the plain torch module: forward and every gradient."""

from __future__ import annotations

import drills
import pytest

from tpcore.mesh import Mesh
from tpcore.processes.pool import RankPool
from tpcore.testing import matrix, run_ranks

POINTS = [pytest.param(*point, id="{}-tp{}-{}".format(*point)) for point in matrix.points()]


def sevenths(cases: list[matrix.Case]) -> list[matrix.Case]:
    """Every seventh, where there are many. 7 divides the length of no axis, so every value comes up."""
    return cases[:: 7 if len(cases) > 20 else 1]


@pytest.mark.parametrize(("layer", "tp", "dtype"), POINTS)
def test_equals_the_plain_module(layer: str, tp: int, dtype: str) -> None:
    """All cases where something is cut, in a full and in a half precision."""
    every = matrix.cases(layer, dtype)
    some = every if drills.ALL or (tp > 1 and dtype in ("fp32", "bf16")) else sevenths(every)
    matrix.report(run_ranks(Mesh({"dp": 1, "tp": tp}), lambda ctx: matrix.run(ctx, some)))


@pytest.mark.parametrize(("tp", "dtype"), [(2, "fp32"), (2, "bf16"), (4, "fp16"), (4, "fp64")])
def test_equals_the_plain_module_on_processes(pool: RankPool, tp: int, dtype: str) -> None:
    some = [case for layer in matrix.AXES for case in sevenths(matrix.cases(layer, dtype))]
    matrix.report(pool.run(Mesh({"dp": 1, "tp": tp}), matrix.run, some, timeout=200.0))
