"""The correctness matrix on replicas: the cases and checks that threads and processes run."""

from __future__ import annotations

import pytest
from onreplicas import on_replicas

from tpcore.testing import matrix

EVERY = 4  # of several hundred cases; 4 divides the length of no axis of options with three values
DTYPES = ("fp32", "bf16")
POINTS = [(f"n{tp}", layer, tp, dtype) for tp in (2, 4) for dtype in DTYPES for layer in matrix.AXES]


def some(layer: str, dtype: str) -> list[matrix.Case]:
    found = [c for c in matrix.cases(layer, dtype) if ("mode", "sparse") not in c.options]
    return found[:: EVERY if len(found) > 20 else 1]


@pytest.mark.parametrize(("process", "layer", "tp", "dtype"), POINTS)
def test_equals_the_plain_module(process, layer, tp, dtype):
    matrix.report(on_replicas(tp, tp, matrix.run, some(layer, dtype)))
