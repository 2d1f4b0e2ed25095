"""The native backend under Neuron's limits, on the stand-in: primitives are right, and none is refused."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as functional_nn
from helpers.rank_pool import RankPool
from helpers.stand_in import FREE, UNDER, counted, ranks_on_the_stand_in  # noqa: F401  the fixture
from helpers.tiers import tiers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.comm.comm import Comm
from tpcore.layers import move_model_to_device
from tpcore.settings import changed
from tpcore.testing.kit import collectives
from tpcore_neuron import NativeBackend
from tpcore_neuron.settings import CORES, LIMITS
from tpcore_neuron.stand_in.device import install
from tpcore_neuron.stand_in.group import LimitedGroup, register
from tpcore_neuron.stand_in.limits import REMEDIES, TABLE, Refusals
from tpcore_neuron.transport import rounds

pytestmark = pytest.mark.xdist_group("native")


def every_call(ctx: ParallelContext) -> tuple[list[str], dict[str, int]]:
    """The kit's checks of the primitives."""
    refused = counted(ctx)
    wrong: list[str] = []
    for primitive in collectives.PRIMITIVES:
        wrong += collectives.groups(ctx, primitive)
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            wrong += collectives.right_values(ctx, primitive, dtype)
    return wrong + collectives.overlapped(ctx), dict(refused)


@pytest.mark.parametrize("axes", tiers([{"dp": 2, "tp": 2}], slow=[{"dp": 1, "tp": 4}]), ids=str)
def test_primitives_are_right_and_none_is_refused(ranks: RankPool, axes: dict[str, int]) -> None:
    mesh = Mesh(axes)
    assert ranks.run(mesh, every_call, **UNDER) == [([], {})] * mesh.size


@given(st.integers(1, 4).flatmap(lambda half: st.permutations(range(2 * half))))
def test_each_send_is_in_one_round_and_each_rank_in_one_pair_of_it(to: list[int]) -> None:
    made = list(rounds(to))
    assert sorted(send for sends, _ in made for send in sends) == [(i, j) for i, j in enumerate(to) if i != j]
    for sends, pairs in made:
        assert pairs[: len(sends)] == sends
        assert sorted(itertools.chain(*pairs)) == list(range(len(to)))


def ended(comm: Comm, call: str, device: torch.device) -> str:
    """Whether signs of zeros arrive, or the error."""
    try:
        return str(bool(torch.signbit(CALLS[call](comm, torch.full((2, 2), -0.0).to(device)).cpu()).all()))
    except (NotImplementedError, RuntimeError) as e:
        return str(e)


def with_and_without(ctx: ParallelContext) -> dict[str, tuple[str, str]]:
    """What primitives end in, also over a backend that says it can do what Neuron cannot."""
    found, backend, group = {}, ctx.backend, ctx.comm("tp").group
    can = backend.capabilities
    for call, (mend, _) in MENDS.items():
        usual = ended(ctx.comm("tp"), call, ctx.device)
        backend.capabilities = replace(can, **mend)  # type: ignore[misc]
        found[call] = usual, ended(backend.comm(group, ctx.rank), call, ctx.device)
    return found


CALLS: dict[str, Any] = {
    "permute": lambda comm, x: comm.permute(x, (1, 0)),
    "all_to_all": lambda comm, x: comm.all_to_all(x, 0, 0),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
    "all_reduce": lambda comm, x: torch.where(comm.all_reduce(odd(x)) == 2 * odd(x), x, 1.0),
    "maximum": lambda comm, x: torch.where(comm.all_reduce(odd(x), "max") == odd(x), x, 1.0),
    "reduce_scatter": lambda comm, x: torch.where(comm.reduce_scatter(odd(x), 0) == 2 * odd(x[:1]), x, 1.0),
}


def odd(x: Tensor) -> Tensor:
    """Whole numbers that float32 rounds."""
    return torch.full_like(x, 2**25 + 1, dtype=torch.int64)


_WHOLE = {"whole_sums": True}, "False"
MENDS: dict[str, tuple[dict[str, Any], str]] = {
    "permute": ({"unequal_parts": True}, "refuses all-to-all of parts of unequal sizes: sizes [0, 4, 0, 4]"),
    "all_to_all": ({"exchange_sizes": None}, "refuses all-to-all over other sizes than 4, 8, 16 or 32n: 2 ranks"),
    "broadcast": ({"broadcasts": True}, "False"),
    **dict.fromkeys(("all_reduce", "maximum", "reduce_scatter"), _WHOLE),
}


def test_each_capability_stands_between_a_call_and_its_limit(ranks: RankPool) -> None:
    for call, (usual, unmended) in ranks.run(Mesh({"dp": 1, "tp": 2}), with_and_without, **UNDER)[0].items():
        assert usual == "True"
        assert MENDS[call][1] in unmended, call


def test_the_backend_asks_for_an_all_to_all_where_the_table_allows_it() -> None:
    table = Refusals(limit.name for limit in TABLE)
    for size, first, step in itertools.product((2, 3, 4, 8, 12, 16, 32, 48, 64), (0, 2, 4, 8, 64), (1, 2)):
        members = range(first, first + size * step, step)
        asked = NativeBackend.capabilities.exchanges(members)
        try:
            table.exchange(members, [])
            allowed = True
        except RuntimeError:
            allowed = False
        assert asked == allowed, list(members)


def exchanged(ctx: ParallelContext, ranks: Any, sizes: list[int]) -> Tensor:
    pair = dist.new_group(ranks)
    x = torch.ones(4, device=ctx.device)
    if ctx.rank in ranks:
        dist.all_to_all_single(x, x.clone(), sizes or None, sizes or None, group=pair)
    return x


def barred(ctx: ParallelContext) -> None:
    some = dist.new_group([0, 1])
    if ctx.rank < 2:
        dist.barrier(some)


def passed_on(ctx: ParallelContext) -> None:
    x = torch.ones(2, device=ctx.device)
    dist.send(x, ctx.rank + 1) if ctx.rank % 2 == 0 else dist.recv(x, ctx.rank - 1)


def reduced(x: Tensor) -> int:
    dist.all_reduce(x)
    return int(x.item())


def broadcast(ctx: ParallelContext) -> bool:
    x = torch.full((1,), -0.0, device=ctx.device)
    dist.broadcast(x, 0)
    return bool(torch.signbit(x.cpu()))


DIRECT: dict[str, Any] = {
    "unequal_parts": lambda ctx: exchanged(ctx, range(4), [0, 2, 0, 2] if ctx.rank % 2 else [2, 0, 2, 0]),
    "group_sizes": lambda ctx: exchanged(ctx, [0, 1], []),
    "empty": lambda ctx: dist.all_reduce(torch.empty(0, device=ctx.device)),
    "barrier": barred,
    "other_device": lambda ctx: dist.all_reduce(torch.ones(1)),
    "other_index": lambda ctx: torch.ones(1, device="neuron:7"),
    "send_recv": passed_on,
    "whole_sums": lambda ctx: reduced(torch.tensor([2**25 + 1], dtype=torch.int32, device=ctx.device)) == 2**27 + 4,
    "signed_zeros": broadcast,
    "float64": lambda ctx: (torch.ones(1, dtype=torch.float64, device=ctx.device) / 3).item() == 1 / 3,
    "int64": lambda ctx: torch.tensor([2**31], device=ctx.device).item() == 2**31,
}


def directly(names: list[str]) -> dict[str, str]:
    """What calls of torch itself end in."""
    ctx = tpcore.init(backend="neuron", tp=1)
    found = {}
    for name in names:
        try:
            found[name] = repr(DIRECT[name](ctx) is False)
        except (NotImplementedError, RuntimeError, ValueError) as e:
            found[name] = f"{type(e).__name__}: {e}"
    refused = install().limits.refused
    lost = {name: found.get(name) == "True" for name in ("int64", "whole_sums")}  # numbers that have lost bits count
    assert all(refused[name] == found[name].count("refuses") + lost.get(name, False) for name in names)
    tpcore.shutdown()
    return found


@pytest.mark.slow
def test_the_stand_in_refuses_and_narrows_what_its_table_says() -> None:
    """And with the limits off it does all of it but what gloo itself cannot: tensors of another device."""
    found = tpcore.launch(directly, 4, args=([*DIRECT],), **UNDER)[0]
    of_table = {limit.name: limit for limit in TABLE}
    for name, ended in found.items():
        limit = of_table[name]
        if limit.error is None:
            assert ended == "True", name
        else:
            said = f"{limit.error.__name__}: Neuron (stand-in, limit {name}) refuses {limit.what}: "
            assert ended.startswith(said), name
            assert ended.endswith(REMEDIES[name]), name
    # the first rank of a group of four, and an early device, need eight ranks and a process of their own
    elsewhere = {"first_rank", "spread_groups", "early_device", *("dynamic", "graph_operators")}
    assert set(of_table) - set(found) == elsewhere
    free = [name for name in DIRECT if name not in ("unequal_parts", "empty")]
    assert set(tpcore.launch(directly, 4, args=(free,), **FREE)[0].values()) == {"False"}


def of_torch(ctx: ParallelContext, folder: str) -> dict[str, int]:
    """What torch.distributed's own functions give: of one tensor for all ranks, of objects, together, in files."""
    refused, size, device = counted(ctx), dist.get_world_size(), ctx.device
    every = torch.empty(size * 2, device=device)
    dist.all_gather_into_tensor(every, torch.full((2,), float(ctx.rank), device=device))
    assert every.tolist() == [float(rank) for rank in range(size) for _ in range(2)]
    stacked = torch.empty(size, 2, device=device)  # in a new first dim
    dist.all_gather_into_tensor(stacked, torch.full((2,), float(ctx.rank), device=device))
    assert stacked.flatten().tolist() == every.tolist()
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, stacked)
    assert part.tolist() == [float(size * ctx.rank)] * 2
    dist.reduce_scatter_tensor(part, every)
    assert part.tolist() == [float(size * ctx.rank)] * 2
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": ctx.rank})
    assert objects == [{"rank": rank} for rank in range(size)]
    first = [ctx.rank]
    dist.broadcast_object_list(first, 0)
    assert first == [0]
    parts = [part.clone(), every.clone()]
    rows = [torch.empty(len(t) * size, device=device) for t in parts]
    with dist._coalescing_manager():
        [dist.all_gather_single(row, t) for row, t in zip(rows, parts, strict=True)]
    with dist._coalescing_manager(async_ops=True) as work:
        [dist.reduce_scatter_single(t, row) for t, row in zip(parts, rows, strict=True)]
    work.wait()
    assert [t.tolist() for t in parts] == [(size * t).tolist() for t in (part, every)]
    assert functional.broadcast(part, 1, dist.group.WORLD).tolist() == [float(size)] * 2
    sums = functional.all_reduce_coalesced([part[0], every], "sum", dist.group.WORLD)
    assert [t.max().item() for t in sums] == [size * sum(range(size)), size * (size - 1)]
    file = io.BytesIO()
    torch.save({"w": every}, file)
    file.seek(0)
    whole = torch.load(file, map_location=device)["w"]
    assert (whole.device, whole.tolist()) == (device, every.tolist())
    saved, read = ({"w": torch.arange(4.0, device=device) * k, "n": 3 * k} for k in (1, 0))
    checkpoint.save(saved, checkpoint_id=folder)
    checkpoint.load(read, checkpoint_id=folder)
    assert (read["w"].tolist(), read["n"]) == ([0.0, 1.0, 2.0, 3.0], 3)
    return dict(refused)


def test_functions_of_torch_distributed_take_the_device(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(Mesh({"dp": 1, "tp": 3}), of_torch, str(tmp_path / "checkpoint"), **UNDER) == [{}] * 3


def parted(ctx: ParallelContext) -> tuple[str, bool, bool, str]:
    """What lists of unequal parts end in; whether DTensor and FSDP2 are right; autocast's type of a convolution."""
    mine, device = ctx.rank + 1, ctx.device
    received = [torch.empty(source + 1, device=device) for source in range(2)]
    try:
        dist.all_to_all(received, [torch.full((mine,), 10.0 * ctx.rank + to, device=device) for to in range(2)])
        ended = str([x.tolist() for x in received])
    except NotImplementedError as e:
        ended = str(e)
    mesh, whole = init_device_mesh("neuron", (2,)), torch.arange(8.0).view(4, 2)
    rows = distribute_tensor(whole.to(device), mesh, [Shard(0)])
    moved = LIMITS.get() or torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor().cpu(), whole)
    torch.manual_seed(0)
    plain = torch.nn.Linear(2, 2)
    cut: Any = fully_shard(move_model_to_device(copy.deepcopy(plain), device), mesh=mesh)
    plain(whole).sum().backward()
    cut(whole[2 * ctx.rank :][:2].to(device)).sum().backward()
    with torch.autocast("neuron", dtype=torch.bfloat16):
        kind = functional_nn.conv1d(torch.ones(1, 2, 4, device=device), torch.ones(2, 2, 1, device=device)).dtype
    return ended, bool(moved), torch.allclose(2 * cut.weight.grad.full_tensor().cpu(), plain.weight.grad), str(kind)


def test_lists_of_unequal_parts_are_refused_and_other_libraries_of_torch_are_right(ranks: RankPool) -> None:
    mesh, right = Mesh({"dp": 1, "tp": 2}), (True, True, "torch.bfloat16")
    for rank, (ended, *others) in enumerate(ranks.run(mesh, parted, **UNDER)):
        assert "limit unequal_parts) refuses all-to-all of parts of unequal sizes: sizes [1, 2, " in ended
        assert tuple(others) == right, rank
    for rank, (ended, *others) in enumerate(ranks.run(mesh, parted, **FREE)):
        assert ended == str([[float(rank)], [10.0 + rank] * 2])
        assert tuple(others) == right


def reduce_scattered(x: Tensor, whole: Callable[[Tensor], Any]) -> Tensor:
    part = x.new_empty(1)
    whole(part)
    return part


def together(x: Tensor) -> Tensor:
    with dist._coalescing_manager():
        dist.all_reduce(x)
    return x


SUMS: dict[str, Callable[[ParallelContext, Tensor], Tensor]] = {
    "all_reduce": lambda ctx, x: dist.all_reduce(x) or x,
    "future": lambda ctx, x: dist.all_reduce(x, async_op=True).get_future().wait()[0],
    "reduce": lambda ctx, x: dist.reduce(x, 0) or x,
    "reduce_scatter": lambda ctx, x: reduce_scattered(x, lambda part: dist.reduce_scatter(part, [*x.split(1)])),
    "reduce_scatter_single": lambda ctx, x: reduce_scattered(x, lambda part: dist.reduce_scatter_single(part, x)),
    "coalesced": lambda ctx, x: together(x),
    "functional": lambda ctx, x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "tpcore": lambda ctx, x: ctx.comm("tp").all_reduce(x),
    "tpcore's scatter": lambda ctx, x: ctx.comm("tp").reduce_scatter(x, 0),
}
TERMS = {torch.int64: ([2**31 - 1, 2**31 - 1], -2), torch.float64: ([1.0, 2.0**-24], 1.0)}
"""Of each rank, which have their 32 bits, and what is left of the sum."""
SUMMED = [(name, dtype) for name in SUMS for dtype in TERMS if "tpcore" not in name or dtype is torch.int64]


def summed(ctx: ParallelContext) -> dict[tuple[str, torch.dtype], tuple[float, int]]:
    """Sums on the first rank that need more bits than their terms, and how many have lost bits."""
    refused, found = counted(ctx), {}
    for name, dtype in SUMMED:
        refused.clear()
        x = torch.tensor([TERMS[dtype][0][ctx.rank]] * 2, dtype=dtype, device=ctx.device)
        found[name, dtype] = SUMS[name](ctx, x)[0].item(), refused["int64"]
    return found


def test_a_sum_of_ranks_is_as_narrow_as_its_terms(ranks: RankPool) -> None:
    found = ranks.run(Mesh({"dp": 1, "tp": 2}), summed, env={LIMITS.name: "float64,int64"})[0]
    assert found == {(name, dtype): (TERMS[dtype][1], int(dtype is torch.int64)) for name, dtype in SUMMED}


RESIZED: dict[str, Callable[[Any], Tensor]] = {
    "arange": lambda device: torch.arange(4, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "out": lambda device: torch.add(*torch.ones(2, 3, device=device), out=torch.empty(0, device=device)),
    "t_": lambda device: torch.ones(2, 3, device=device).t_(),
    "tensor": lambda device: torch.tensor([torch.ones(1, device=device).sum()] * 2, device=device),
    "unsqueeze_": lambda device: torch.ones(2, 3, device=device).unsqueeze_(1),
}


def sizes(ctx: ParallelContext) -> list[str]:
    """Which operators leave a tensor on the device with other sizes than on the CPU."""
    both = {name: (call(ctx.device), call("cpu")) for name, call in RESIZED.items()}
    return [name for name, (x, y) in both.items() if (x.shape, x.stride()) != (y.shape, y.stride())]


def test_a_tensor_has_the_sizes_that_operators_give_it(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"tp": 1}), sizes, **UNDER) == [[]]


def connected(ctx: ParallelContext) -> tuple[list[str], dict[str, float]]:
    """The collectives with which this rank's groups were made, and what they give."""
    asked, call = [], LimitedGroup._call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LimitedGroup, "_call", lambda pg, name, *rest: asked.append(name) or call(pg, name, *rest))
        comms = {axis: ctx.comm(axis) for axis in ("dp", "tp")}
    mine = torch.tensor([float(ctx.rank)], device=ctx.device)
    return asked, {axis: comm.all_reduce(mine).item() for axis, comm in comms.items()}


def test_groups_are_made_without_a_collective(ranks: RankPool) -> None:
    for rank, (asked, sums) in enumerate(ranks.run(Mesh({"dp": 2, "tp": 2}), connected, **UNDER)):
        assert asked == []
        assert sums == {"dp": 2.0 * (rank % 2) + 2, "tp": 4.0 * (rank // 2) + 1}


def places(ctx: ParallelContext) -> tuple[str, str]:
    """The device of this rank, and of one whose runtime says another index after the start."""
    backend = NativeBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install(), "current_device", lambda: 5)
        backend.start(60.0)
    return str(ctx.device), str(backend.device())


def test_the_runtime_is_asked_for_the_devices_index(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"tp": 1}), places, **UNDER) == [("neuron:0", "neuron:5")]


ELSEWHERE: dict[str, Callable[[ParallelContext], Any]] = {
    "made": lambda ctx: torch.ones(1, device="neuron:7"),
    "moved": lambda ctx: torch.ones(1).to("neuron:7"),
    "set": lambda ctx: torch.get_device_module("neuron").set_device(7),
    "entered": lambda ctx: torch.get_device_module("neuron").device("neuron:7").__enter__(),
    "empty": lambda ctx: dist.all_gather([torch.ones(0, device=ctx.device)], torch.ones(1, device=ctx.device)),
}
"""On another device, or with a tensor without elements among others."""


def asked_elsewhere(ctx: ParallelContext) -> list[str]:
    found = []
    for call in ELSEWHERE.values():
        with pytest.raises((RuntimeError, ValueError)) as refused:
            call(ctx)
        found.append(str(refused.value).partition(" refuses ")[0].rpartition(" ")[2])
    return [*found, str((torch.ones(1, dtype=torch.complex128, device=ctx.device) / 3).item() == 1 / 3)]


def test_each_way_to_another_device_is_refused_and_complex_numbers_are_narrow(ranks: RankPool) -> None:
    wanted = [["other_index)"] * 4 + ["empty)", "False"]]
    assert ranks.run(Mesh({"tp": 1}), asked_elsewhere, **UNDER) == wanted


def early() -> str:
    register(frozenset({"early_device"}))
    torch.ones(1, device="neuron")
    with pytest.raises(tpcore.BackendError) as refused:
        tpcore.init(backend="neuron")
    return str(refused.value)


@pytest.mark.slow
def test_a_device_used_too_early_is_told_with_the_remedy() -> None:
    said = tpcore.launch(early, 1, **UNDER)[0]
    assert "before the process group is made: call tpcore.init before" in said
    assert "before anything is moved to the device" in said


def with_a_range_of_cores(ctx: ParallelContext) -> str:
    with changed({CORES.name: "0-63"}), pytest.raises(tpcore.BackendError) as refused:
        NativeBackend().start(60.0)
    return str(refused.value)


def test_a_range_of_cores_is_refused_at_the_start(ranks: RankPool) -> None:
    (said,) = ranks.run(Mesh({"tp": 1}), with_a_range_of_cores, **UNDER)
    assert "0-63: each process of the native backend opens one core" in said


@pytest.mark.parametrize("value", ["1.0,x", "sometimes", "2.x"])
def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TPCORE_NEURON_LIMITS", value)
    with pytest.raises(ValueError, match=r"TPCORE_NEURON_LIMITS must be an SDK such as 2.33, names of limits or none"):
        LIMITS.get()
