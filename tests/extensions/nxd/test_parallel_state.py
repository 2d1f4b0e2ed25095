"""The getters of parallel_state: layouts in threads, torch groups and initialization in processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import Context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.rank_pool import RankPool
from helpers.worlds import each_rank
from torch import Tensor

import tpcore
from tpcore.backend.interface import Backend
from tpcore.comm.transport import Transport
from tpcore.layout.mesh import Group, Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_nxd.parallel_layers import parallel_state as ps

GETTERS = [n for n in ps.__all__ if n.startswith(("get_", "is_global")) and n != "get_rank_info_str"]


def _mesh(world: int, tp: int) -> Mesh:
    return Mesh({"pp": 1, "dp": world // tp, "tp": tp})


AXES = {"pipeline_model": "pp", "data": "dp", "expert_data": "dp", "tensor_model": "tp"}
AXES |= {"context_model": None, "expert_model": None}


@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 1, 1), (1, 4, 1), (1, 2, 3), (1, 4, 8), (2, 2, 2)])
@each_rank(pp="pp", dp="dp", tp="tp")
def test_every_rank_knows_its_place(ctx: ParallelContext, pp: int, dp: int, tp: int) -> None:
    """Row-major [pp, dp, tp], written out once more: tp ranks side by side, dp ranks tp apart, stages the furthest."""
    grid = torch.arange(pp * dp * tp).view(pp, dp, tp, 1)
    at = {}
    for name, axis in AXES.items():
        dim = ["pp", "dp", "tp", None].index(axis)
        groups = grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()
        mine = next(ranks for ranks in groups if ctx.rank in ranks)
        at[axis] = mine.index(ctx.rank)
        assert getattr(ps, f"get_{name}_parallel_group")(True) == groups
        assert getattr(ps, f"get_{name}_parallel_group")(as_list=True) == groups
        assert getattr(ps, f"get_{name}_parallel_replica_groups")() == groups
        assert getattr(ps, f"get_{name}_parallel_size")() == len(mine)
        assert getattr(ps, f"get_{name}_parallel_rank")() == mine.index(ctx.rank)
        if name in ("data", "tensor_model"):
            assert getattr(ps, f"get_{name}_parallel_src_rank")() == mine[0]
    assert ps.is_global_rank_zero() == (ctx.rank == 0)
    assert ps.get_world_group(as_list=True) == [list(range(ctx.mesh.size))]
    assert ps.get_pipeline_model_parallel_prev_rank() == (ctx.rank - dp * tp) % ctx.mesh.size
    assert ps.get_pipeline_model_parallel_next_rank() == (ctx.rank + dp * tp) % ctx.mesh.size
    assert ps.get_pipeline_model_parallel_group() is ctx.comm("pp").process_group
    assert ps.get_context_model_parallel_src_tgt_pairs() == [[rank, rank] for rank in range(ctx.mesh.size)]
    assert ps.rmsg("ready") == f"[rank_{ctx.rank}_pp{at['pp']}_tp{at['tp']}_dp{at['dp']}_cp0] ready"
    assert ps.get_rank_info_str() == f"DP_{at['dp']}_TP_{at['tp']}_PP_{at['pp']}"


def test_groups_of_some_stages() -> None:
    """Four stages of two ranks: 0 1 | 2 3 | 4 5 | 6 7. Sums show who is in a group."""

    def total(ctx: ParallelContext, group: Any) -> int:
        return int(ctx.comm_for(group).all_reduce(torch.tensor([10**ctx.rank]))) if group is not None else 0

    def ask(ctx: ParallelContext) -> None:
        stage, first = ctx.coord("pp"), ctx.coord("tp")
        ends = ps.create_pg_with_ranks([0, 3])
        assert total(ctx, ends) == (10**first + 10 ** (6 + first) if stage in (0, 3) else 0)
        assert ps.create_pg_with_ranks([0, 3]) is ends
        some = ps.create_pg_with_ranks([0, 1, 3])  # the other group is smaller
        assert (some is None) == (stage == 2)
        after, before = (stage + 1) % 4 * 2 + first, (stage - 1) % 4 * 2 + first
        pairs = [(ps.get_next_rank_group(), after), (ps.get_prev_rank_group(), before)]
        for group, other in reversed(pairs) if stage % 2 else pairs:  # even stages begin with their next one
            assert total(ctx, group) == 10**ctx.rank + 10**other
        odd = [[2, 4], [6, 0], [3, 5], [7, 1]]
        assert ps.get_next_rank_group(as_list=True) == (odd if stage % 2 else [[0, 2], [4, 6], [1, 3], [5, 7]])

    run_ranks(Mesh({"pp": 4, "dp": 1, "tp": 2}), ask)
    with pytest.raises(ValueError, match="1 pipeline stages make no pairs"):
        run_ranks(_mesh(2, 2), lambda ctx: ps.get_next_rank_group())


@pytest.mark.parametrize("name", GETTERS)
def test_getter_before_init_says_what_to_do(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"call tpcore\.init"):
        getattr(ps, name)()


def test_before_init() -> None:
    assert ps.get_data_parallel_world_size is ps.get_data_parallel_size
    assert ps.get_tensor_parallel_size is ps.get_tensor_model_parallel_world_size is ps.get_tensor_model_parallel_size
    assert not ps.model_parallel_is_initialized()
    ps.destroy_model_parallel()  # scripts call it in their clean-up, whatever went before
    assert ps.rmsg("hello") == "[rank_0_pp-1_tp-1_dp-1_cp-1] hello"
    assert ps.get_rank_info_str() == "model_parallel_uninitialized"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process that no launcher started, on gloo; left uninitialized."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPCORE_BACKEND", "cpu_gloo")
    yield
    if tpcore.is_initialized():
        tpcore.shutdown()


def test_world_of_one(alone: None) -> None:
    ps.initialize_model_parallel(1, 1, 1, 1, False, 1)
    assert ps.model_parallel_is_initialized()
    assert (ps.get_data_parallel_size(), ps.get_tensor_model_parallel_size()) == (1, 1)
    assert dist.get_world_size(ps.get_data_parallel_group()) == 1
    with pytest.raises(RuntimeError, match="already initialized"):
        ps.initialize_model_parallel()
    ps.destroy_model_parallel()
    assert not ps.model_parallel_is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"lnc_size": 2}, "lnc_size=2 is not supported"), ({"tensor_model_parallel_size": 2}, "--nproc_per_node=2")],
)
def test_what_is_refused_is_not_lowered(alone: None, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.initialize_model_parallel(**sizes)
    assert not ps.model_parallel_is_initialized()
    assert not dist.is_initialized()


class _Deaf(Transport):
    """Of a group whose other member is never heard."""

    compares = True

    def all_reduce(self, x: Tensor, op: str, donate: bool) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x, x], dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(2, dim)[0]


class _DeafBackend(Backend):
    interface = 2

    def start(self, timeout: float) -> tuple[int, int]:
        return 0, 2

    def connect(self, group: Group, rank: int) -> Transport:
        return _Deaf(group, rank)

    def device(self) -> torch.device:
        return torch.device("cpu")


def test_first_collective_and_its_switch(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tpcore.runtime.init"], "load_backend", lambda name: _DeafBackend())
    with pytest.raises(tpcore.BackendError, match="over 2 ranks counted 1: _DeafBackend"):
        ps.initialize_model_parallel(2)
    assert not ps.model_parallel_is_initialized()
    ps.initialize_model_parallel(2, skip_collective_init=True)
    assert ps.model_parallel_is_initialized()


# -- processes ----------------------------------------------------------------------------------------
def _groups(ctx: ParallelContext) -> None:
    for get in (ps.get_world_group, *(getattr(ps, f"get_{name}_parallel_group") for name in AXES)):
        mine = next(ranks for ranks in get(as_list=True) if ctx.rank in ranks)
        group = get()
        assert isinstance(group, dist.ProcessGroup)
        assert dist.get_process_group_ranks(group) == mine
        assert dist.get_rank(group) == mine.index(ctx.rank)
        x = torch.tensor([1 << ctx.rank])
        dist.all_reduce(x, group=group)
        assert x.item() == sum(1 << r for r in mine)
    y = torch.tensor([ctx.rank])
    dist.broadcast(y, ps.get_tensor_model_parallel_src_rank(), ps.get_tensor_model_parallel_group())
    assert y.item() == ctx.rank // 2 * 2


def test_groups_serve_torch_distributed(pool: RankPool) -> None:
    pool.run(_mesh(4, 2), _groups)


def _adopt(ctx: ParallelContext) -> None:
    """As in a script that joined its job itself: torch's default group is there, no context is."""
    rank = ctx.rank

    def members(group: Any) -> int:
        x = torch.tensor([1 << dist.get_rank()])
        dist.all_reduce(x, group=group)
        return int(x)

    def script() -> None:
        for tp, said in ((3, "tp=3 does not divide the world of 4"), (8, "tp=8 .*larger than the world of 4")):
            with pytest.raises(ValueError, match=said):
                ps.initialize_model_parallel(tensor_model_parallel_size=tp)
            assert not ps.model_parallel_is_initialized()
        ps.initialize_model_parallel(tensor_model_parallel_size=2)
        assert ps.get_tensor_model_parallel_group(as_list=True) == [[0, 1], [2, 3]]
        assert (ps.get_tensor_model_parallel_rank(), ps.get_data_parallel_rank()) == (rank % 2, rank // 2)
        assert members(ps.get_data_parallel_group()) == [0b0101, 0b1010][rank % 2]
        ps.destroy_model_parallel()
        assert not ps.model_parallel_is_initialized()
        assert dist.is_initialized()  # the script's own, and the script's to end
        ps.initialize_model_parallel(4)
        assert ps.get_tensor_model_parallel_size() == 4
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(2, pipeline_model_parallel_size=2)
        assert ps.get_pipeline_model_parallel_group(as_list=True) == [[0, 2], [1, 3]]
        assert ps.get_pipeline_model_parallel_rank() == rank // 2
        assert members(ps.get_pipeline_model_parallel_group()) == [0b0101, 0b1010][rank % 2]
        ps.destroy_model_parallel()

    Context().run(script)


def test_initialize_in_a_job_the_script_joined_itself(pool: RankPool) -> None:
    pool.run(_mesh(4, 2), _adopt)
