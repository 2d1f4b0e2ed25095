"""Layers on the stand-in for Neuron: each equals the plain module, and nothing is refused."""

from __future__ import annotations

import pytest
import torch
from helpers.rank_pool import RankPool
from helpers.stand_in import FREE, UNDER, counted, ranks_on_the_stand_in  # noqa: F401  the fixture
from helpers.tiers import tiers
from torch import nn
from torch.autograd import forward_ad

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.testing import matrix

pytestmark = pytest.mark.xdist_group("native")


def of_matrix(ctx: ParallelContext, dtype: str, every: int) -> tuple[list[str], dict[str, int]]:
    refused = counted(ctx)
    some = [case for layer in matrix.AXES for case in matrix.cases(layer, dtype)[::every]]
    return list(matrix.run(ctx, some)), dict(refused)


@pytest.mark.parametrize(
    ("world", "dtype", "every"),
    tiers([(2, "fp32", 29)], [(2, "fp32", 1), (4, "bf16", 3)], [(4, "fp32", 1), (8, "fp32", 3), (8, "fp16", 7)]),
)
@pytest.mark.parametrize("limits", tiers(["under"], drill=["free"]))
def test_layers_equal_the_plain_modules(ranks: RankPool, world: int, dtype: str, every: int, limits: str) -> None:
    how = UNDER if limits == "under" else FREE
    found = ranks.run(Mesh({"dp": 1, "tp": world}), of_matrix, dtype, every, timeout=400.0, **how)
    matrix.report([wrong for wrong, _ in found])
    assert [refused for _, refused in found] == [{}] * world


def tangents(ctx: ParallelContext) -> dict[str, int]:
    """In forward mode, by torch.autograd and by torch.func."""
    refused = counted(ctx)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    want = torch.func.jvp(plain, (x,), (x.cos(),))[1]
    up = tpcore.ColumnParallelLinear.from_plain(plain[0], gather_output=False)
    down = tpcore.RowParallelLinear.from_plain(plain[2], input_is_parallel=True)
    layers = tpcore.layers.move_model_to_device(nn.Sequential(up, nn.Tanh(), down), ctx.device)
    x = x.to(ctx.device)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(layers(forward_ad.make_dual(x, x.cos()))).tangent
        torch.testing.assert_close(got.cpu(), want)
    torch.testing.assert_close(
        torch.func.jvp(lambda x: x.tanh() * 2, (x,), (x,))[1].cpu(), 2 * x.cpu() / x.cpu().cosh() ** 2
    )
    return dict(refused)


def test_forward_mode(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), tangents, **UNDER) == [{}] * 2


def sparse(ctx: ParallelContext) -> str:
    table = tpcore.layers.move_model_to_device(tpcore.ParallelEmbedding(8, 4, sparse=True), ctx.device)
    with pytest.raises(NotImplementedError, match="has no sparse tensors, and sparse=True makes a sparse gradient"):
        table(torch.tensor([1]).to(ctx.device))
    with pytest.raises(NotImplementedError, match="no tensors of the layout"):
        torch.zeros(1, device=ctx.device).to_sparse()
    return "refused"


def test_sparse_tensors_are_refused_before_backward(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), sparse, **UNDER) == ["refused"] * 2


def wide(ctx: ParallelContext) -> bool:
    x = torch.ones(2, 2, device=ctx.device)
    with torch.inference_mode():
        assert not x[0].is_inference()  # as on any device: a view of a tensor from outside
        assert (x + 1).is_inference()
    with pytest.raises(ValueError, match=r"ColumnParallelLinear.weight of torch.float64: this backend computes on"):
        tpcore.ColumnParallelLinear(4, 4, dtype=torch.float64)
    return True


def test_float64_is_refused_with_its_name(ranks: RankPool) -> None:
    assert all(ranks.run(Mesh({"dp": 1, "tp": 2}), wide, **UNDER))
