"""The gloo backend's collectives, exact on integers."""

from __future__ import annotations

import torch

from tpcore.context import ParallelContext
from tpcore.mesh import Mesh
from tpcore.testing.pool import RankPool


def _sum(ctx: ParallelContext) -> float:
    return float(ctx.comm("tp").all_reduce(torch.tensor([float(ctx.rank)])))


def test_all_reduce(pool: RankPool) -> None:
    assert pool.run(Mesh({"dp": 2, "tp": 2}), _sum) == [1.0, 1.0, 5.0, 5.0]
    assert pool.run(Mesh({"tp": 2}), _sum) == [1.0, 1.0]
