"""The sharded loss under torch.func between processes, whose transport writes into memory of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from helpers.rank_pool import RankPool
from torch import Tensor
from torch.func import grad, jvp, vmap

import tpcore
from tpcore import Mesh


def _check(ctx: tpcore.ParallelContext) -> None:
    made = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 6, 10, generator=made, dtype=torch.double)
    target = torch.randint(0, 10, (4, 6), generator=made)
    mine = slice(5 * ctx.rank, 5 * ctx.rank + 5)
    part = whole[..., mine].contiguous()

    def sharded(x: Tensor, y: Tensor) -> Tensor:
        return tpcore.parallel_cross_entropy(x, y).mean()

    plain: Any = F.cross_entropy
    close = torch.testing.assert_close
    close(vmap(sharded)(part, target), vmap(plain)(whole, target))
    close(vmap(grad(sharded))(part, target), vmap(grad(plain))(whole, target)[..., mine])
    close(grad(sharded)(part[0], target[0]), grad(plain)(whole[0], target[0])[..., mine])
    for row in (0, 1):
        here = jvp(lambda x: sharded(x, target[row]), (part[row],), (part[row],))  # noqa: B023
        close(here, jvp(lambda x: plain(x, target[row]), (whole[row],), (whole[row],)))  # noqa: B023


def test_equals_torch_on_the_whole(pool: RankPool) -> None:
    pool.run(Mesh({"tp": 2}), _check)
