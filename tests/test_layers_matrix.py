"""Every layer under every option equals the plain torch module: forward and every gradient."""

from __future__ import annotations

import pytest

from tpcore.mesh import Mesh
from tpcore.processes.pool import RankPool
from tpcore.testing import matrix, run_ranks

POINTS = [pytest.param(*point, id="{}-tp{}-{}".format(*point)) for point in matrix.points()]


@pytest.mark.parametrize(("layer", "tp", "dtype"), POINTS)
def test_equals_the_plain_module(layer: str, tp: int, dtype: str) -> None:
    some = matrix.cases(layer, dtype)
    matrix.report(run_ranks(Mesh({"dp": 1, "tp": tp}), lambda ctx: matrix.run(ctx, some)))


@pytest.mark.parametrize(("tp", "dtype"), [(2, "fp32"), (2, "bf16"), (4, "fp16"), (4, "fp64")])
def test_equals_the_plain_module_on_processes(pool: RankPool, tp: int, dtype: str) -> None:
    every = [matrix.cases(layer, dtype) for layer in matrix.AXES]
    # every seventh, where there are many: 7 divides the length of no axis, so every value of each comes up
    some = [case for cases in every for case in cases[:: 7 if len(cases) > 20 else 1]]
    matrix.report(pool.run(Mesh({"dp": 1, "tp": tp}), matrix.run, some))
