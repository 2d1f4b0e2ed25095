"""The correctness matrix on replicas: the cases and checks that threads and processes run."""

from __future__ import annotations

import pytest
from onreplicas import on_replicas
from tiers import tiers

from tpcore.testing import matrix

DTYPES = ("fp32", "bf16")
POINTS = [(layer, tp, dtype) for tp in (2, 4) for dtype in DTYPES for layer in matrix.AXES]
SAMPLE, FULL = (17, 7), (5, 1)  # one of so many cases, and where there are few


def some(layer: str, tp: int, dtype: str, strides: tuple[int, int]) -> list[matrix.Case]:
    """Every 17th, or of few every 7th, since each compiles programs of its own. Each tp and dtype begins
    elsewhere, and the strides share no factor with the length of an axis: the four meet all values."""
    found = [c for c in matrix.cases(layer, dtype) if ("mode", "sparse") not in c.options]
    stride = strides[len(found) <= 20]
    first = DTYPES.index(dtype) + len(DTYPES) * (tp > 2)
    return found[first % stride :: stride]


@pytest.mark.parametrize(
    ("layer", "tp", "dtype", "strides"), tiers([(*p, SAMPLE) for p in POINTS], drill=[(*p, FULL) for p in POINTS])
)
def test_equals_the_plain_module(layer, tp, dtype, strides):
    matrix.report(on_replicas(tp, tp, matrix.run, some(layer, tp, dtype, strides)))
