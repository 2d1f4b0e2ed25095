"""Collectives of the gloo backend beside the kit: donated memory, groups of the user and for the user."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from roads import GLOO, OverRoad, each_road  # noqa: F401  a fixture

from tpcore.layers import ContextParallelAttention
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext


def _donated(ctx: ParallelContext) -> None:
    comm = ctx.comm("tp")
    x = torch.ones(8)
    assert comm.all_reduce(x, donate=True).data_ptr() == x.data_ptr()
    assert comm.all_reduce(x).data_ptr() != x.data_ptr()
    kept = torch.ones(8, requires_grad=True)
    for y in (comm.all_reduce(kept), comm.all_gather(kept, 0), comm.reduce_scatter(kept, 0), comm.broadcast(kept, 0)):
        assert not y.requires_grad, "a collective is no autograd function: its gradient would be wrong"


def test_donated_memory_is_used_and_other_is_not(pool: OverRoad) -> None:
    pool.run(Mesh({"tp": 2}), _donated)


def _user_group(ctx: ParallelContext) -> None:
    ours = ctx.comm("tp").process_group
    x = torch.tensor([float(ctx.rank)])
    dist.all_reduce(x, group=ours)
    assert x.item() == 6.0
    pg = dist.new_group([0, 3])
    if ctx.rank in (0, 3):
        comm = ctx.comm_for(pg)
        assert comm is ctx.comm_for(pg)
        assert comm.process_group is pg
        assert comm.all_gather(torch.tensor([ctx.rank]), 0).tolist() == [0, 3]
    assert ctx.comm_for(ours).process_group is ours


def test_groups_of_the_user_and_for_the_user(pool: OverRoad) -> None:
    pool.run(Mesh({"tp": 4}), _user_group)


def _ring(ctx: ParallelContext) -> None:
    made = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 16, 4, dtype=torch.float64, generator=made).requires_grad_() for _ in range(3)]
    want = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    gradients = torch.autograd.grad(want.square().sum(), whole)
    attention = ContextParallelAttention("ring", context_parallel_group=ctx.comm("tp"))
    for _ in range(3):  # blocks of one call under way beside those of the next
        mine = [attention.order.cut(t.detach(), 2).requires_grad_() for t in whole]
        out = attention(*mine)
        out.square().sum().backward()
        torch.testing.assert_close(attention.order.whole(out, 2), want, rtol=1e-12, atol=1e-12)
        for t, expected in zip(mine, gradients, strict=True):
            # float64, in which the order of sums is all that differs
            torch.testing.assert_close(t.grad, attention.order.cut(expected, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool", [GLOO], indirect=True)  # in memory: test_shared_memory.py
def test_blocks_of_a_ring_are_under_way_while_ranks_compute(pool: OverRoad) -> None:
    pool.run(Mesh({"tp": 4}), _ring)
