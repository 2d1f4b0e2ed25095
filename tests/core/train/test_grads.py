"""The mean over data parallel, and the step: as for the unsharded model and the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.nets import assert_same_parameters, cut_net, ids_of, loss_of, plain_net
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.train import data_parallel


@pytest.fixture(params=[1, 200, 25 * 2**20])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes: a gradient each, a few together, all together."""
    monkeypatch.setattr(data_parallel, "BUCKET", request.param)
    return int(request.param)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 1)])
@each_rank(dp="dp", tp="tp")
def test_mean_of_the_parts_is_the_gradient_of_the_whole_batch(
    ctx: ParallelContext, dp: int, tp: int, bucket: int
) -> None:
    plain = plain_net()
    loss_of(plain, ids_of(batch=8)).backward()
    want = {k: p.grad for k, p in plain.named_parameters() if p.grad is not None}
    net = cut_net(plain.state_dict())
    loss_of(net, ids_of(batch=8).chunk(dp)[ctx.coord("dp")]).backward()
    tpcore.reduce_gradients(net)
    assert net.unused.weight.grad is None
    del net.unused
    assert_same_parameters(net, want, ctx, lambda p: p.grad)


@each_rank(dp=2, tp=1)
def test_gradients_of_different_kinds_travel_together(ctx: ParallelContext) -> None:
    """Dtypes, memory orders, a frozen parameter, and each exact: small integers and a group of two."""
    params: list[nn.Parameter] = []
    for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16]):
        p = nn.Parameter(torch.zeros(3, 4, dtype=dtype))
        p.grad = torch.full((4, 3), float(2 * i + 4 * ctx.rank), dtype=dtype).t()
        params.append(p)
    scalar = nn.Parameter(torch.zeros(()))
    scalar.grad = torch.tensor(float(ctx.rank))
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    frozen.grad = torch.full((2,), float(ctx.rank))
    tpcore.reduce_gradients([*params, scalar, frozen])
    for i, p in enumerate(params):
        assert p.grad is not None
        assert p.grad.dtype == p.dtype
        assert (p.grad == 2 * i + 2).all()
    assert scalar.grad == 0.5
    assert (frozen.grad == ctx.rank).all()


@each_rank(dp=2, tp=2)
def test_a_parameter_used_on_one_dp_rank_only(ctx: ParallelContext) -> None:
    used, unused = (tpcore.ColumnParallelLinear(4, 4, bias=False) for _ in range(2))
    if ctx.coord("dp") == 1:
        used.weight.grad = torch.full_like(used.weight, 6.0)
    tpcore.reduce_gradients([used.weight, unused.weight])
    assert used.weight.grad is not None
    assert (used.weight.grad == 3.0).all()
    assert unused.weight.grad is None


@each_rank(dp=2, tp=2)
def test_sparse_gradients_are_averaged_and_clipped(ctx: ParallelContext) -> None:
    """Each dp rank has looked up other rows."""
    plain = plain_net(sparse=True)
    loss_of(plain, ids_of(batch=8)).backward()
    want = {k: p.grad.to_dense() for k, p in plain.named_parameters() if p.grad is not None}
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]))
    net = cut_net(plain.state_dict(), sparse=True)
    loss_of(net, ids_of(batch=8).chunk(2)[ctx.coord("dp")]).backward()
    assert net.embed.weight.grad.is_sparse
    tpcore.reduce_gradients(net)
    del net.unused
    assert_same_parameters(net, want, ctx, lambda p: p.grad)

    whole = cut_net(plain.state_dict(), sparse=True)
    loss_of(whole, ids_of(batch=8)).backward()
    got = tpcore.clip_grad_norm(whole, float(norm) / 2)
    torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)
    assert whole.embed.weight.grad.is_sparse
    torch.testing.assert_close(tpcore.clip_grad_norm(whole, 1e9), norm / 2, rtol=1e-5, atol=0)


# -- the step ----------------------------------------------------------------------------------------------


def _ddp(ctx: ParallelContext, full: dict[str, Tensor]) -> dict[str, Tensor]:
    net = cut_net(full)
    del net.unused  # DDP wants every parameter used
    ddp = nn.parallel.DistributedDataParallel(net, process_group=ctx.comm("dp").process_group)
    loss_of(ddp, ids_of(batch=8).chunk(2)[ctx.coord("dp")]).backward()
    tp, specs = ctx.comm("tp"), tpcore.layers.shard_specs(net)
    return {k: specs[k].unshard(list(tp.all_gather(p.grad[None], 0))) for k, p in net.named_parameters()}


def test_distributed_data_parallel_over_the_dp_group(pool: Any) -> None:
    plain = plain_net()
    loss_of(plain, ids_of(batch=8)).backward()
    for got in pool.run(Mesh({"dp": 2, "tp": 2}), _ddp, plain.state_dict()):
        for name, grad in got.items():
            torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-13)
