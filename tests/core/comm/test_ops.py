"""The mappings as linear algebra: backward is the transpose of forward, and backward of backward is forward.

Integers in float64, so every sum is exact and every comparison an equality.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm
from tpcore.runtime.context import ParallelContext

SHAPE = (4, 8, 12)
Fn = Callable[[Tensor, Comm, int], Tensor]


class Mapping(NamedTuple):
    """``replicated``: one value that every rank holds. ``parts``: each rank's own, cut or a summand."""

    fn: Fn
    source: str
    target: str
    cut_source: bool
    cut_target: bool


MAPPINGS = {
    "copy": Mapping(lambda x, c, d: ops.copy(x, c), "replicated", "parts", False, False),
    "reduce": Mapping(lambda x, c, d: ops.reduce(x, c), "parts", "replicated", False, False),
    "scatter": Mapping(ops.scatter, "replicated", "parts", False, True),
    "gather": Mapping(ops.gather, "parts", "replicated", True, False),
    "all_gather": Mapping(ops.all_gather, "parts", "parts", True, False),
    "reduce_scatter": Mapping(ops.reduce_scatter, "parts", "parts", False, True),
    "all_to_all": Mapping(lambda x, c, d: ops.all_to_all(x, c, d, d), "parts", "parts", False, False),
    "shift": Mapping(lambda x, c, d: ops.shift(x, c), "parts", "parts", False, False),
    "shift back by two": Mapping(lambda x, c, d: ops.shift(x, c, -2), "parts", "parts", False, False),
}


def integers(kind: str, cut: bool, dim: int, comm: Comm, seed: int) -> Tensor:
    """Small ones: the same on every rank, or each rank's own."""
    shape = list(SHAPE)
    if cut:
        shape[dim] //= comm.size
    generator = torch.Generator().manual_seed(seed + (int(comm.position) + 1) * 100 * (kind == "parts"))
    return torch.randint(-8, 9, shape, generator=generator).double()


def inner(a: Tensor, b: Tensor, kind: str, comm: Comm) -> Tensor:
    """Inner product over the group: what is replicated counts once."""
    here = (a * b).sum().reshape(1)
    everywhere = comm.all_gather(here, 0)
    if kind == "replicated":
        assert (everywhere == here).all(), f"a replicated product differs: {everywhere}"
        return here
    return everywhere.sum()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MAPPINGS)
@each_rank(tp="tp")
def test_backward_is_the_transpose_and_its_own_backward_forward(ctx: ParallelContext, name: str, tp: int) -> None:
    """<f(x), y> == <x, f_T(y)>, and inputs and gradients are left as they were."""
    m = MAPPINGS[name]
    comm = ctx.comm("tp")
    for dim in (0, 1, 2, -1, -2, -3):
        x = integers(m.source, m.cut_source, dim, comm, 1).requires_grad_()
        y = integers(m.target, m.cut_target, dim, comm, 2).requires_grad_()
        v = integers(m.source, m.cut_source, dim, comm, 3)
        before = x.detach().clone(), y.detach().clone()
        out = m.fn(x, comm, dim)
        assert out.shape == y.shape
        (grad,) = torch.autograd.grad(out, x, y, create_graph=True)
        assert inner(out, y, m.target, comm) == inner(x, grad, m.source, comm)
        (again,) = torch.autograd.grad(grad, y, v)
        assert torch.equal(again, m.fn(v, comm, dim))
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])


@each_rank(tp=4)
def test_a_shift_goes_to_the_rank_that_is_the_step_further(ctx: ParallelContext) -> None:
    for step in (1, -1, -2):
        got = ops.shift(torch.tensor([float(ctx.rank)]), ctx.comm("tp"), step)
        assert float(got) == (ctx.rank - step) % 4


SUMS: dict[str, Callable[[Tensor, Comm, torch.dtype | None], Tensor]] = {
    "reduce": lambda x, c, d: ops.reduce(x, c, dtype=d),
    "reduce_scatter": lambda x, c, d: ops.reduce_scatter(x, c, 0, dtype=d),
    "copy, backward": lambda x, c, d: transposed(x, lambda t: ops.copy(t, c, dtype=d)),
    "all_gather, backward": lambda x, c, d: transposed(x, lambda t: ops.all_gather(t, c, 0, dtype=d), c.size),
}


def transposed(y: Tensor, fn: Callable[[Tensor], Tensor], parts: int = 1) -> Tensor:
    x = y.new_zeros(y.shape[0] // parts).requires_grad_()
    fn(x).backward(y)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(("dtype", "want"), [(torch.float32, 260.0), (None, 256.0), (torch.float64, 260.0)])
@each_rank(tp=4)
def test_sums_are_taken_in_the_precision_asked_for(
    ctx: ParallelContext, name: str, dtype: torch.dtype | None, want: float
) -> None:
    """256 + 1 + 1 + 1: bfloat16 has no 257, so that one by one each 1 is lost; 259 rounds to 260."""
    x = torch.full((4,), 1.0 if ctx.rank else 256.0, dtype=torch.bfloat16)
    got = SUMS[name](x, ctx.comm("tp"), dtype)
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [want] * got.numel()


@each_rank(tp=2)
def test_a_lower_precision_than_the_tensors_own_is_never_used(ctx: ParallelContext) -> None:
    x = torch.tensor([2.0**40 + ctx.rank], dtype=torch.float64)
    assert float(ops.reduce(x, ctx.comm("tp"), dtype=torch.float32)) == 2.0**41 + 1


@pytest.mark.parametrize("name", ["scatter", "reduce_scatter", "gather", "all_gather"])
@each_rank(tp=2)
def test_what_cannot_be_cut_is_refused_before_anything_is_sent(ctx: ParallelContext, name: str) -> None:
    m = MAPPINGS[name]
    comm = ctx.comm("tp")
    if not m.cut_source:
        with pytest.raises(ValueError, match=r"cannot split dim 1 of shape \(4, 3\) over \('tp',\) of size 2"):
            m.fn(torch.zeros(4, 3), comm, 1)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"no dim {dim} in a tensor of shape \(4, 2\)"):
            m.fn(torch.zeros(4, 2), comm, dim)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("split", "concat"), [(0, 1), (2, 0), (-1, 1)])
@each_rank(tp="n")
def test_all_to_all_is_undone_by_its_gradient_and_that_by_its_own(
    ctx: ParallelContext, split: int, concat: int, n: int
) -> None:
    whole = torch.randn(SHAPE).double()
    comm = ctx.comm("tp")
    mine = comm.split(whole, concat).requires_grad_()
    out = ops.all_to_all(mine, comm, split, concat)
    assert torch.equal(out, comm.split(whole, split))
    grad = torch.zeros_like(out, requires_grad=True)
    (back,) = torch.autograd.grad(out, mine, grad, create_graph=True)
    (again,) = torch.autograd.grad(back, grad, mine.detach())
    assert torch.equal(again, out)


@pytest.mark.parametrize("blocks", [1, 3])
@each_rank(dp=1, tp=2)
def test_gathered_outputs_of_a_layer_are_its_features(ctx: ParallelContext, blocks: int) -> None:
    plain, comm = nn.Linear(4, 21, dtype=torch.float64), ctx.comm("tp")
    layer = tpcore.ColumnParallelLinear.from_plain(plain, gather_output=False, blocks=blocks, pad=True)
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(ops.gather(layer(x), comm), plain(x))
    with pytest.raises(ValueError, match=r"a layer with pad=True makes \d+ features .* pass size=, the number without"):
        ops.gather(layer(x).exp(), comm)
    if blocks == 1:
        torch.testing.assert_close(ops.gather(layer(x).exp(), comm, size=21), plain(x).exp())
    packed = tpcore.ColumnParallelLinear.from_plain(nn.Linear(4, 24), gather_output=False, blocks=blocks)
    gathering = tpcore.ColumnParallelLinear.from_plain(nn.Linear(4, 24), blocks=blocks)
    gathering.weight, gathering.bias = packed.weight, packed.bias
    torch.testing.assert_close(ops.gather(packed(x.float()), comm), gathering(x.float()))
