"""Every primitive of the neuron backend against plain torch, on real replicas: 1-D and 2-D meshes."""

from __future__ import annotations

import functools

import pytest
import torch
from onreplicas import on_replicas
from tpcore_neuron.testing import programs

import tpcore
from tpcore.runtime.consensus import gather_bytes
from tpcore.runtime.context import ParallelContext

MESHES = [(2, 2), (2, 1), (4, 4), (4, 2), (4, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


def inputs(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """What every rank puts in: small whole numbers, exact in every dtype and in every order of a sum."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randint(0, 8, shape, generator=generator) for _ in range(world)]
    return [v % 2 == 0 if dtype is torch.bool else v.to(dtype) for v in values]


def primitives(ctx: ParallelContext, axis: str, dtype: torch.dtype) -> dict[str, tuple]:
    """Name -> (what the backend gave, what it should have given)."""
    comm = ctx.comm(axis)
    members = comm.group.members(ctx.rank)
    me, n = members.index(ctx.rank), len(members)
    shape = (4, 8, 4)
    every = inputs(ctx.mesh.size, shape, dtype)
    mine = [every[r] for r in members]
    x = every[ctx.rank].to(ctx.device)
    out = {}
    total = functools.reduce(torch.logical_or if dtype is torch.bool else torch.add, mine)
    out["sum"] = comm.all_reduce(x), total
    out["max"] = comm.all_reduce(x, "max"), torch.stack(mine).amax(0)
    out["started sum"] = comm.start_all_reduce(x)(), total
    for dim in (0, 1, -1):
        out[f"gather {dim}"] = comm.all_gather(x, dim), torch.cat(mine, dim)
        out[f"split {dim}"] = comm.split(x, dim), x.cpu().chunk(n, dim)[me]
        if dtype is not torch.bool:
            out[f"reduce_scatter {dim}"] = comm.reduce_scatter(x, dim), total.chunk(n, dim)[me]
    strided = every[ctx.rank].transpose(0, 2).to(ctx.device)
    out["gather of strides"] = comm.all_gather(strided, 1), torch.cat([m.transpose(0, 2) for m in mine], 1)
    out["broadcast"] = comm.broadcast(x, n - 1), mine[-1]
    empty = torch.empty(0, 4, dtype=dtype, device=ctx.device)
    out["sum of nothing"] = comm.all_reduce(empty), torch.empty(0, 4, dtype=dtype)
    out["gather of nothing"] = comm.all_gather(empty, 1), torch.empty(0, 4 * n, dtype=dtype)
    if n > 1:
        chunks = [m.chunk(n, 1)[me] for m in mine]
        out["all_to_all"] = comm.all_to_all(x, 1, 0), torch.cat(chunks, 0)
        out["permute"] = comm.permute(x, [(i + 1) % n for i in range(n)]), mine[me - 1]
        out["started permute"] = comm.start_permute(x, [(i + 1) % n for i in range(n)])(), mine[me - 1]
    out["input"] = x, every[ctx.rank]
    ctx.backend.mark_step()
    return {name: (got.cpu(), want) for name, (got, want) in out.items()}


@pytest.mark.parametrize(
    ("world", "tp", "dtype"),
    [(*mesh, dtype) for mesh in MESHES for dtype in (DTYPES if mesh == (4, 2) else (torch.float32, torch.bool))],
)
def test_primitives(world, tp, dtype):
    for axis in ("tp", "dp"):
        for rank, found in enumerate(on_replicas(world, tp, primitives, axis, dtype)):
            for name, (got, want) in found.items():
                assert got.dtype == want.dtype, f"{name} over {axis} on rank {rank}"
                assert torch.equal(got, want), f"{name} over {axis} on rank {rank}: {got} is not {want}"


def nan_stays_where_it_is(ctx: ParallelContext) -> torch.Tensor:
    comm = ctx.comm("tp")
    x = torch.full((2, 2), float("nan") if ctx.coord("tp") else 1.0).to(ctx.device)
    return comm.broadcast(x, 0)


def test_broadcast_takes_nothing_from_the_others():
    for got in on_replicas(4, 2, nan_stays_where_it_is):
        assert torch.equal(got, torch.ones(2, 2))


def library_groups(ctx: ParallelContext) -> dict[str, torch.Tensor]:
    """The same sums by torch.distributed and by xm, with what parallel_state hands out."""
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    ps = tpcore.nxd.parallel_state
    out = {}
    for axis, group in (("tp", ps.get_tensor_model_parallel_group), ("dp", ps.get_data_parallel_group)):
        x = torch.tensor([2.0**ctx.rank]).to(ctx.device)
        dist.all_reduce(x, group=group())
        out[f"dist {axis}"] = x
        y = torch.tensor([2.0**ctx.rank]).to(ctx.device)
        out[f"xm {axis}"] = xm.all_reduce("sum", y, groups=group(as_list=True), pin_layout=False)
        z = torch.tensor([2.0**ctx.rank]).to(ctx.device)
        out[f"comm {axis}"] = tpcore.comm.mappings.reduce(z, ctx.comm_for(group()))
        gathered = torch.empty(ctx.comm(axis).size, device=ctx.device)
        dist.all_gather_into_tensor(gathered, torch.tensor([2.0**ctx.rank]).to(ctx.device), group=group())
        out[f"dist gather {axis}"] = gathered.sum().reshape(1)
    ctx.backend.mark_step()
    return out


def test_groups_work_with_the_libraries_own_calls():
    for rank, found in enumerate(on_replicas(4, 2, library_groups)):
        for name, got in found.items():
            members = {"tp": (rank // 2 * 2, rank // 2 * 2 + 1), "dp": (rank % 2, rank % 2 + 2)}[name.split()[-1]]
            assert got.tolist() == [sum(2.0**r for r in members)], name


def wrong_device(ctx: ParallelContext) -> None:
    ctx.comm("tp").all_reduce(torch.ones(2, 3))


def test_a_tensor_on_the_wrong_device_is_refused():
    message = r"all_reduce sum over \('tp',\): a tensor of shape \(2, 3\) is on cpu, and this rank's device is xla:"
    with pytest.raises(ValueError, match=message):
        on_replicas(4, 2, wrong_device)


def messages(ctx: ParallelContext) -> int:
    for length in (0, 3, 40, 64, 100, 128, 3):
        said = gather_bytes(bytes([ctx.rank + 1]) * length, ctx.world)
        assert said == [bytes([rank + 1]) * length for rank in range(ctx.world.size)]
    return len({p.digest for p in programs() if p.collectives})


def test_messages_of_all_lengths_share_a_few_programs():
    assert on_replicas(2, 2, messages) == [3] * 2  # of the lengths, of up to 64 bytes, of up to 128


def permuted(ctx: ParallelContext) -> list[str]:
    comm, wrong = ctx.comm("tp"), []
    n, me = comm.size, ctx.coord("tp")
    maps = [(*range(1, n), 0), (n - 1, *range(n - 1)), (n - 1, *range(1, n - 1), 0), tuple(range(n))]
    maps += [(n - 1, *[None] * (n - 1)), (None, *range(n - 1)), tuple([None] * n)]
    for dtype in (torch.float32, torch.bool):
        every = inputs(n, (2, 3), dtype)
        for to in maps:
            got = comm.permute(every[me].to(ctx.device), to).cpu()
            want = every[to.index(me)] if me in to else torch.zeros(2, 3, dtype=dtype)
            if not torch.equal(got, want):
                wrong.append(f"{to} of {dtype} on rank {me}: {got} is not {want}")
    return wrong


@pytest.mark.parametrize("how", ["native", "pairs"])
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 4), (4, 2)])
def test_permutations_by_whichever_way(world, tp, how):
    assert on_replicas(world, tp, permuted, env={"TPCORE_NEURON_PERMUTE": how}) == [[]] * world


def test_a_way_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="TPCORE_NEURON_PERMUTE must be one of native, pairs, not 'both'"):
        on_replicas(2, 2, permuted, env={"TPCORE_NEURON_PERMUTE": "both"})
