"""Collectives of the neuron backend beside the kit: what else replicas do with its groups and its permutations."""

from __future__ import annotations

import pytest
import torch
from onreplicas import on_replicas

import tpcore
import tpcore_nxd
from tpcore.runtime.consensus import gather_bytes
from tpcore.runtime.context import ParallelContext
from tpcore_neuron.testing import programs


def inputs(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """What every rank puts in: small whole numbers, exact in every dtype and in every order of a sum."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randint(0, 8, shape, generator=generator) for _ in range(world)]
    return [v % 2 == 0 if dtype is torch.bool else v.to(dtype) for v in values]


def library_groups(ctx: ParallelContext) -> dict[str, torch.Tensor]:
    """The same sums by torch.distributed and by xm, with what parallel_state hands out."""
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    ps = tpcore_nxd.parallel_state
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
