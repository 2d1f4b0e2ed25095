"""Each collective of the gloo backend against the same thing computed from all ranks' values, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from roads import OverRoad, each_road  # noqa: F401  a fixture
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tpcore.comm.comm import Comm
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext

MESHES = {"tp2": {"tp": 2}, "tp4": {"tp": 4}, "dp2xtp2": {"dp": 2, "tp": 2}}
SUMMED = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
MOVED = (*SUMMED, "complex64", "uint16", "float8_e4m3fn")
SHAPES = ((4,), (4, 8), (8, 4, 4), (4, 1, 8, 4), (0, 4), (4, 0))

meshes = pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)


def _values(shape: tuple[int, ...], position: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, which every dtype holds and sums exactly; different at each position."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * (position + 3)) % 7 % (2 if dtype is torch.bool else 7)).to(dtype).view(shape)


def _same(got: Tensor, want: Tensor) -> None:
    assert got.is_contiguous()
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    as_bytes = (t.contiguous().view(-1).view(torch.uint8) for t in (got, want))
    assert torch.equal(*as_bytes), f"got {got}, want {want}"


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat, which does not take every dtype that can be moved."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat(parts, dim)
    return torch.cat([t.view(torch.uint8) for t in parts], dim).view(parts[0].dtype)


def _inputs(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    every = [_values(shape, p, dtype) for p in range(comm.size)]
    return every[int(comm.position)].clone(), every


def _each(ctx: ParallelContext, check: Callable[[ParallelContext, torch.dtype], None], dtypes: Sequence[str]) -> None:
    """All dtypes in one job: to start one costs more than to check a dtype."""
    for name in dtypes:
        try:
            check(ctx, getattr(torch, name))
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from e


def _move(ctx: ParallelContext, dtype: torch.dtype) -> None:
    for axis in ctx.mesh.axes:
        comm = ctx.comm(axis)
        for shape in SHAPES:
            x, every = _inputs(comm, shape, dtype)
            for dim in range(-len(shape), len(shape)):
                _same(comm.all_gather(x, dim), _cat(every, dim))
            for src in range(comm.size):
                _same(comm.broadcast(x, src), every[src])
            _same(x, every[int(comm.position)])


@meshes
def test_gather_and_broadcast_move_any_dtype(pool: OverRoad, axes: dict[str, int]) -> None:
    pool.run(Mesh(axes), _each, _move, MOVED, timeout=200.0)


def _sum(ctx: ParallelContext, dtype: torch.dtype) -> None:
    for axis in ctx.mesh.axes:
        comm = ctx.comm(axis)
        me = int(comm.position)
        for shape in SHAPES:
            x, every = _inputs(comm, shape, dtype)
            total = torch.stack(every).sum(0, dtype=dtype)
            _same(comm.all_reduce(x), total)
            _same(comm.all_reduce(x, "max"), torch.stack(every).amax(0))
            _same(comm.start_all_reduce(x)(), total)
            _same(comm.all_reduce(x.clone(), donate=True), total)
            for dim in range(-len(shape), len(shape)):
                if shape[dim] % comm.size == 0:
                    _same(comm.reduce_scatter(x, dim), total.chunk(comm.size, dim)[me].contiguous())
            _same(x, every[me])


@meshes
def test_reductions(pool: OverRoad, axes: dict[str, int]) -> None:
    pool.run(Mesh(axes), _each, _sum, SUMMED, timeout=200.0)


def _strided(ctx: ParallelContext) -> None:
    comm = ctx.comm("tp")
    me = int(comm.position)
    every = [_values((4, 8, 4), p, torch.float64).transpose(0, 2)[:, ::2] for p in range(comm.size)]
    x = every[me]
    assert not x.is_contiguous()
    total = torch.stack(every).sum(0)
    for dim in (0, 1, 2):
        _same(comm.all_gather(x, dim), torch.cat(every, dim))
        _same(comm.reduce_scatter(x, dim), total.chunk(comm.size, dim)[me].contiguous())
    for donate in (False, True):  # memory with gaps cannot be reduced in place, and must not be written
        _same(comm.all_reduce(x, donate=donate), total)
        assert torch.equal(x, _values((4, 8, 4), me, torch.float64).transpose(0, 2)[:, ::2])
    _same(comm.broadcast(x, 1), every[1].contiguous())


def test_inputs_of_any_strides(pool: OverRoad) -> None:
    pool.run(Mesh({"tp": 4}), _strided)


def _scalar(ctx: ParallelContext) -> tuple[float, float]:
    comm = ctx.comm("tp")
    x = torch.tensor(float(ctx.rank + 1))
    return float(comm.all_reduce(x)), float(comm.broadcast(x, 1))


def test_scalars(pool: OverRoad) -> None:
    assert pool.run(Mesh({"tp": 2}), _scalar) == [(3.0, 2.0)] * 2


def _donated(ctx: ParallelContext) -> None:
    comm = ctx.comm("tp")
    x = torch.ones(8)
    assert comm.all_reduce(x, donate=True).data_ptr() == x.data_ptr()
    assert comm.all_reduce(x).data_ptr() != x.data_ptr()
    kept = torch.ones(8, requires_grad=True)
    for y in (
        comm.all_reduce(kept),
        comm.all_gather(kept, 0),
        comm.reduce_scatter(kept, 0),
        comm.broadcast(kept, 0),
    ):
        assert not y.requires_grad, "a collective is no autograd function: its gradient would be wrong"


def test_donated_memory_is_used_and_other_is_not(pool: OverRoad) -> None:
    pool.run(Mesh({"tp": 2}), _donated)


def _overlapped(ctx: ParallelContext) -> None:
    comm = ctx.comm("tp")
    waits = [comm.start_all_reduce(torch.full((1000,), float(i + ctx.rank))) for i in range(5)]
    local = torch.ones(64, 64) @ torch.ones(64, 64)
    gathered = comm.all_gather(local[:1, :1], 0)
    for i, wait in reversed(list(enumerate(waits))):
        _same(wait(), torch.full((1000,), 2.0 * i + 1))
    _same(gathered, torch.full((2, 1), 64.0))


def test_several_all_reduces_under_way(pool: OverRoad) -> None:
    pool.run(Mesh({"tp": 2}), _overlapped)


def _meaningless(ctx: ParallelContext) -> list[str]:
    comm, said = ctx.comm("tp"), []
    for make in (
        lambda: comm.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn)),
        lambda: comm.reduce_scatter(torch.zeros(2, dtype=torch.uint16), 0),
        lambda: comm.all_reduce(torch.zeros(2, dtype=torch.complex64), "max"),
        lambda: comm.reduce_scatter(torch.zeros(3), 0),
        lambda: comm.all_gather(torch.zeros(3), 1),
        lambda: comm.broadcast(torch.zeros(3), 2),
    ):
        try:
            make()
        except ValueError as e:
            said.append(str(e))
    assert float(comm.all_reduce(torch.ones(()))) == 2.0, "a refused call leaves the group usable"
    return said


def test_what_cannot_be_done_is_refused_before_anything_moves(pool: OverRoad) -> None:
    said = pool.run(Mesh({"tp": 2}), _meaningless)[0]
    assert "sum of torch.float8_e4m3fn" in said[0]
    assert "sum of torch.uint16" in said[1]
    assert "max of torch.complex64" in said[2]
    assert "not divisible" in said[3]
    assert "no dim 1" in said[4]
    assert "no member 2" in said[5]


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
        _same(comm.all_gather(torch.tensor([ctx.rank]), 0), torch.tensor([0, 3]))
    assert ctx.comm_for(ours).process_group is ours


def test_groups_of_the_user_and_for_the_user(pool: OverRoad) -> None:
    pool.run(Mesh({"tp": 4}), _user_group)


def _data_parallel(ctx: ParallelContext) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    parallel = DistributedDataParallel(model, process_group=ctx.comm("dp").process_group)
    batch = torch.arange(32, dtype=torch.float64).view(8, 4)
    mine = batch.chunk(ctx.comm("dp").size)[ctx.coord("dp")]
    parallel(mine).pow(2).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_ddp_over_the_dp_group(pool: OverRoad) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    model(torch.arange(32, dtype=torch.float64).view(8, 4)).pow(2).mean().backward()
    for grads in pool.run(Mesh({"dp": 2, "tp": 1}), _data_parallel):
        for got, want in zip(grads, (model.weight.grad, model.bias.grad), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)  # float64, another order of 8 terms
