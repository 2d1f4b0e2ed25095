"""Backends over torch.distributed: a small one, what is declared, and gloo's collectives beside the kit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.rank_pool import RankPool
from helpers.transports import GLOO, OverRoad, each_road  # noqa: F401  a fixture
from helpers.worlds import Alike

import tpcore
from tpcore.backend.interface import Capabilities
from tpcore.c10d.backend import C10dBackend
from tpcore.layers import ContextParallelAttention
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.kit.lost import Losses, lost


class Simple(C10dBackend):
    """All of a backend. On an accelerator: its transport, and the device of LOCAL_RANK."""

    interface = 2
    transport = "gloo"

    def device(self) -> torch.device:
        return torch.device("cpu")


def _alone(ctx: ParallelContext) -> None:
    group = ctx.comm("dp").process_group
    assert group is ctx.comm("dp").process_group
    assert torch.distributed.get_world_size(group) == 1


def test_a_group_of_one_is_made_when_it_is_asked_for() -> None:
    with RankPool(2, backend=Simple) as simple:
        simple.run(Mesh({"dp": 1, "tp": 2}), _alone)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.xdist_group("kit")  # as tests/core/conformance/test_kit_lost.py
def test_lost_ranks_are_told_by_a_backend_that_adds_nothing() -> None:
    """The supervision of cpu_gloo and of cuda is that of the base, but not all they do for it."""
    assert run_ranks(Mesh({"tp": 2}), lambda ctx: lost(ctx, Losses(Simple, 200.0))) == [[], []]


@pytest.mark.parametrize("which", ["all", "one"])
def test_a_program_may_destroy_the_groups_before_shutdown(which: str) -> None:
    """As scripts do at their end that made the groups themselves before."""
    ctx = tpcore.init(Simple())
    group = ctx.comm("dp").process_group
    torch.distributed.destroy_process_group(None if which == "all" else group)
    tpcore.shutdown()
    assert not torch.distributed.is_initialized()


class Limited(ThreadBackend):
    capabilities = Capabilities(dtypes=(torch.float32, torch.bfloat16, torch.int64, torch.uint8), group_sizes=(2, 8))

    def __init__(self, world: int) -> None:
        super().__init__(0, Alike(world))


def test_a_group_that_it_cannot_form_is_refused_by_init() -> None:
    with pytest.raises(ValueError, match=r"Limited cannot form a tp group of 4 ranks; it forms .*\[2, 8\]"):
        tpcore.init(Limited(4), tp=4)
    with pytest.raises(ValueError, match="a world group of 4 ranks"):
        tpcore.init(Limited(4), tp=2)
    assert not tpcore.is_initialized()
    tpcore.init(Limited(2), tp=2)
    tpcore.shutdown()


def test_a_dtype_that_it_does_not_declare_is_refused_when_the_layer_is_made() -> None:
    tpcore.init(Limited(2), tp=2)
    try:
        with pytest.raises(ValueError, match=r"ColumnParallelLinear.weight of torch.float64: this backend"):
            tpcore.ColumnParallelLinear(4, 4, dtype=torch.float64)
        tpcore.ColumnParallelLinear(4, 4, dtype=torch.bfloat16)
    finally:
        tpcore.shutdown()


def test_an_interface_that_is_not_ours_is_refused_by_init_too() -> None:
    class Old(Limited):
        interface = 0

    with pytest.raises(tpcore.BackendError, match="Old: it was written for version 0"):
        tpcore.init(Old(2), tp=2)


INTERFACE = {
    tpcore.backend.Backend: [
        "adopt", "capabilities", "comm", "comm_of", "compile_ahead", "compile_with", "connect", "device",
        "get_rng_state", "gone", "grouped_matmul", "interface", "job", "load_program", "manual_seed", "mark_step",
        "memory_of", "most_ranks", "remark", "set_rng_state", "start", "stop", "trace", "transport_class",
        "unavailable",
    ],
    tpcore.comm.Comm: [
        "all_gather", "all_reduce", "all_to_all", "broadcast", "called", "chunk", "in_order", "permute",
        "process_group", "rank", "reduce_scatter", "split", "start_all_reduce", "start_permute", "start_reduce_scatter",
        "traced",
    ],
    tpcore.comm.Transport: [
        "all_gather", "all_reduce", "all_to_all", "at", "broadcast", "compares", "eager", "in_graphs", "permute",
        "process_group", "reads_are_cheap", "reduce_scatter", "start_all_reduce", "start_permute",
        "start_reduce_scatter",
    ],
    Capabilities: [
        "broadcasts", "dtypes", "dynamic_shapes", "exchange_sizes", "exchanges", "functional", "group_sizes", "lack",
        "misfit", "moved", "sums", "to_json", "tracing", "unequal_parts", "whole_sums",
    ],
}  # fmt: skip


@pytest.mark.parametrize("cls", INTERFACE, ids=lambda c: c.__name__)
def test_the_plugin_interface_is_frozen(cls: type) -> None:
    """A name added with a default needs a line here; one removed or changed, also a new INTERFACE."""
    assert tpcore.backend.INTERFACE == 2
    names = {n for n in vars(cls) if not n.startswith("_")}
    assert sorted(names) == sorted(INTERFACE[cls])


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
