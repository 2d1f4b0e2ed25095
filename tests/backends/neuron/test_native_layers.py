"""Layers on the stand-in for Neuron: each equals the plain module, and nothing is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.rank_pool import RankPool
from helpers.stand_in import FREE, UNDER, counted, ranks_on_the_stand_in  # noqa: F401  the fixture
from helpers.tiers import tiers
from torch import nn
from torch.autograd import forward_ad

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.layers import move_model_to_device
from tpcore.settings import CHECK, changed
from tpcore.testing import matrix
from tpcore_neuron.stand_in.device import install

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


class Loss(nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return tpcore.parallel_cross_entropy(x, ids)


def tangents(ctx: ParallelContext) -> dict[str, int]:
    """In forward mode, by torch.autograd and by torch.func."""
    refused = counted(ctx)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    want = torch.func.jvp(plain, (x,), (x.cos(),))[1]
    up = tpcore.ColumnParallelLinear.from_plain(plain[0], gather_output=False)
    down = tpcore.RowParallelLinear.from_plain(plain[2], input_is_parallel=True)
    layers = move_model_to_device(nn.Sequential(up, nn.Tanh(), down), ctx.device)
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


FREE_OF_KERNELS = (
    *("view", "t", "transpose", "permute", "unsqueeze", "squeeze", "select", "slice", "expand", "detach"),
    *("_unsafe_view", "new_empty", "empty_like"),
)
"""Views, and memory that nothing is written to."""
OPERATORS: dict[str, tuple[Any, int, int]] = {
    # forward and backward, of which a gradient that is added to another is one
    "column": (lambda: tpcore.ColumnParallelLinear(16, 32, gather_output=False), 1, 6),
    "column, tokens": (lambda: tpcore.ColumnParallelLinear(16, 32, gather_output=False, sequence_dim=1), 2, 8),
    "row": (lambda: tpcore.RowParallelLinear(32, 16, input_is_parallel=True), 2, 6),
    "row, tokens": (lambda: tpcore.RowParallelLinear(32, 16, input_is_parallel=True, sequence_dim=1), 3, 7),
    "norm": (lambda: tpcore.LayerNorm(16), 1, 4),
    "embedding": (lambda: tpcore.ParallelEmbedding(12, 16), 10, 3),
    "loss": (Loss, 29, 7),
}


def dispatched(ctx: ParallelContext) -> dict[str, tuple[int, int]]:
    """How many operators that are kernels layers dispatch in the second step, without those of checks."""
    found, device, ids = {}, install(), torch.arange(8).view(2, 4).to(ctx.device)

    def kernels(run: Any) -> int:
        device.operators.clear()
        with changed({CHECK.name: "off"}):
            out = run()
        count = sum(n for name, n in device.operators.items() if name not in FREE_OF_KERNELS)
        results.append(out)
        return count

    for name, (make, *_) in OPERATORS.items():
        layer, results = move_model_to_device(make(), ctx.device), list[Any]()
        x = ids if name == "embedding" else torch.randn(2, 4, 16).to(ctx.device).requires_grad_()
        for _ in range(2):
            forward = kernels(lambda: layer(x, ids) if name == "loss" else layer(x))  # noqa: B023
            grad = torch.ones_like(results[-1])
            backward = kernels(lambda: results[-1].backward(grad))  # noqa: B023
        found[name] = forward, backward
    return found


def test_layers_dispatch_few_operators(ranks: RankPool) -> None:
    """Each costs 55 to 65 microseconds on Neuron, whatever its size."""
    for found in ranks.run(Mesh({"dp": 1, "tp": 2}), dispatched, **UNDER):
        assert found == {name: tuple(most) for name, (_, *most) in OPERATORS.items()}


def sparse(ctx: ParallelContext) -> str:
    table = move_model_to_device(tpcore.ParallelEmbedding(8, 4, sparse=True), ctx.device)
    with pytest.raises(NotImplementedError, match="has no sparse tensors, and sparse=True makes a sparse gradient"):
        table(torch.tensor([1]).to(ctx.device))
    with pytest.raises(NotImplementedError, match="no tensors of the layout"):
        torch.zeros(1, device=ctx.device).to_sparse()
    return "refused"


def test_sparse_tensors_are_refused_before_backward(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), sparse, **UNDER) == ["refused"] * 2


def wide(ctx: ParallelContext) -> bool:
    x = torch.ones(2, 2, device=ctx.device)
    with pytest.raises(RuntimeError, match=r"of the CPU and of neuron in one operator: move them by \.to\("):
        torch.add(x, torch.ones(2, 2))
    with torch.inference_mode():
        assert not x[0].is_inference()  # as on any device: a view of a tensor from outside
        assert (x + 1).is_inference()
    with pytest.raises(ValueError, match=r"ColumnParallelLinear.weight of torch.float64: this backend computes on"):
        tpcore.ColumnParallelLinear(4, 4, dtype=torch.float64)
    return True


def test_tensors_of_the_cpu_and_float64_are_refused_with_what_to_do(ranks: RankPool) -> None:
    assert all(ranks.run(Mesh({"dp": 1, "tp": 2}), wide, **UNDER))
