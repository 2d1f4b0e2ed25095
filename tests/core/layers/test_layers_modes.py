"""Layers under what torch can do around them: no gradients, in-place ops, frozen parameters, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext

LAYERS = {
    "column": "ColumnParallelLinear(8, 8)",
    "column, not gathered": "ColumnParallelLinear(8, 8, gather_output=False)",
    "column, padded": "ColumnParallelLinear(8, 7, gather_output=False, pad=True)",
    "column, padded and gathered": "ColumnParallelLinear(8, 7, pad=True)",
    "column, replicated": "ColumnParallelLinear(8, 6, gather_output=False, blocks=[Block(4), Block(2, 2, True)])",
    "column, conv1d": "layers.ColumnParallelConv1D(8, 8)",
    "row, conv1d": "layers.RowParallelConv1D(8, 8)",
    "column, sequence parallel": "ColumnParallelLinear(8, 8, sequence_dim=0)",
    "row": "RowParallelLinear(8, 8)",
    "row, sequence parallel": "RowParallelLinear(8, 8, input_is_parallel=True, sequence_dim=0)",
    "embedding": "ParallelEmbedding(8, 8)",
    "embedding, padding": "ParallelEmbedding(8, 8, 0)",
    "embedding by columns": "ParallelEmbedding(8, 8, 0, shard_across_embedding=True)",
    "embedding, sequence parallel": "ParallelEmbedding(8, 8, sequence_dim=0)",
    "layer norm": "LayerNorm(8, sequence_parallel=True)",
    "rms norm": "RMSNorm(8)",
}


def made(name: str) -> tuple[Any, Tensor]:
    """A layer, and an input of it."""
    layer = eval(LAYERS[name], {**vars(tpcore)})
    if "embedding" in name:
        return layer, torch.randint(8, (2, 4))
    return layer, torch.randn(4, 8 // layer.tp.size if name == "row, sequence parallel" else 8)


at_tp_1_and_2 = pytest.mark.parametrize("tp", [1, 2])


IN_PLACE: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda y: F.relu(y, inplace=True), F.relu),
    (lambda y: y.add_(1), lambda y: y + 1),
    (lambda y: y.mul_(2), lambda y: y * 2),
]


@at_tp_1_and_2
@pytest.mark.parametrize("name", LAYERS)
@each_rank(tp="tp")
def test_without_gradients_and_with_outputs_changed_in_place(ctx: ParallelContext, name: str, tp: int) -> None:
    """As of nn.Linear: the same values, and ``relu(inplace=True)`` or ``+= residual`` hurt no gradient."""
    torch.manual_seed(0)
    layer, x = made(name)
    before, want = layer.weight.detach().clone(), layer(x)
    assert want.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = layer(x)
        assert not got.requires_grad
        assert torch.equal(got, want)
    for changes in IN_PLACE:
        grads = []
        for change in changes:
            layer.zero_grad()
            change(layer(x)).square().sum().backward()
            grads.append(layer.weight.grad.clone())
        assert torch.equal(*grads)
    assert torch.equal(layer.weight, before)
    layer.requires_grad_(False)
    assert torch.equal(layer(x), want)
    assert not layer(x).requires_grad


def loaded(name: str, plain: nn.Module, ctx: ParallelContext) -> nn.Module:
    """The layer of ``LAYERS`` with its part of the parameters of ``plain``."""
    layer, _ = made(name)
    n, r = ctx.comm("tp").size, ctx.coord("tp")
    layer.load_state_dict({k: s.shard(plain.state_dict()[k], r, n) for k, s in layer.shard_specs.items()})
    return layer


@at_tp_1_and_2
@pytest.mark.parametrize("name", ["column", "row"])
@pytest.mark.parametrize("frozen", ["input", "weight", "bias", "weight and bias"])
@each_rank(tp="tp")
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(
    ctx: ParallelContext, name: str, tp: int, frozen: str
) -> None:
    torch.manual_seed(0)
    plain, x, grad = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    leaf = x.clone().requires_grad_()
    plain(leaf).backward(grad)
    layer = loaded(name, plain, ctx)
    for key, p in layer.named_parameters():
        p.requires_grad_(key not in frozen)
    mine = x.clone().requires_grad_(frozen != "input")
    layer(mine).backward(grad)
    assert (mine.grad is None) == (frozen == "input")
    if mine.grad is not None:
        torch.testing.assert_close(mine.grad, leaf.grad, rtol=0, atol=1e-5)  # float32, sums of 8
    for key, p in layer.named_parameters():
        assert (p.grad is None) == (key in frozen)
        if p.grad is not None:
            want = layer.shard_specs[key].shard(plain.get_parameter(key).grad, ctx.coord("tp"), tp)
            torch.testing.assert_close(p.grad, want, rtol=0, atol=1e-5)


@at_tp_1_and_2
@pytest.mark.parametrize("name", ["column", "row"])
@each_rank(tp="tp")
def test_autocast(ctx: ParallelContext, name: str, tp: int) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 8), torch.randn(4, 8)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(leaf)
    want.sum().backward()
    layer = loaded(name, plain, ctx)
    mine = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(mine)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    # bfloat16 has 8 bits; three roundings of values below 4
    torch.testing.assert_close(y, want, rtol=0, atol=3 * 2**-7)
    assert mine.grad is not None
    assert mine.grad.dtype == torch.float32
    torch.testing.assert_close(mine.grad, leaf.grad, rtol=0, atol=3 * 2**-7)
    shard = layer.shard_specs["weight"].shard(plain.weight.grad, ctx.coord("tp"), tp)
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, shard, rtol=0, atol=3 * 2**-7)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "layer norm"])
@each_rank(dp=1, tp=2)
def test_no_tokens(ctx: ParallelContext, name: str) -> None:
    layer, x = made(name)
    for shape in ((0,), (0, 3), (4, 0)):
        leaf = x.new_zeros(shape if "embedding" in name else (*shape, x.shape[-1]))
        if x.is_floating_point():
            leaf.requires_grad_()
        y = layer(leaf)
        assert y.numel() == 0
        y.sum().backward()
        assert not layer.weight.grad.any()
        assert leaf.grad is None or leaf.grad.shape == leaf.shape


@each_rank(dp=1, tp=2)
def test_bias_left_to_the_caller_is_the_one_to_add(ctx: ParallelContext) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    for make in (tpcore.ColumnParallelLinear, tpcore.RowParallelLinear):
        layer = make(8, 8, skip_bias_add=True)
        y, bias = layer(x)
        layer.skip_bias_add = False
        assert torch.equal(layer(x), y + bias)
        assert make(8, 8, bias=False, skip_bias_add=True)(x)[1] is None


def _integers(*shape: int, seed: int) -> Tensor:
    """-1, 0 and 1: sums of a few dozen products are exact."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("lead", [(5,), (2, 1, 3, 2), ()])
@pytest.mark.parametrize("layout", ["contiguous", "expanded"])
@pytest.mark.parametrize("name", ["column", "row"])
@each_rank(tp="tp")
def test_any_number_of_leading_dims_and_any_memory_order(
    ctx: ParallelContext, tp: int, lead: tuple[int, ...], layout: str, name: str
) -> None:
    def results(layer: nn.Module) -> list[Any]:
        x, grad = (_integers(*lead, 8, seed=seed) for seed in (5, 6))
        if layout == "expanded":
            x, grad = (t[..., :1].expand_as(t) for t in (x, grad))
        y = layer(x.requires_grad_())
        y.backward(grad)
        return [y.detach(), x.grad, layer.weight.grad]

    plain = nn.Linear(8, 8)
    plain.load_state_dict({"weight": _integers(8, 8, seed=1), "bias": torch.zeros(8)})
    layer, (y, grad_x, grad_weight) = loaded(name, plain, ctx), results(plain)
    want = [y, grad_x, layer.shard_specs["weight"].shard(grad_weight, ctx.coord("tp"), tp)]
    assert all(map(torch.equal, results(layer), want))


def _sums_of_256_and_ones(ctx: ParallelContext) -> list[list[float]]:
    """Every sum over ranks that a layer makes, of values that are 256 on one rank and 1 on the others."""
    mine = torch.full((1, 1), 1.0 if ctx.rank else 256.0, dtype=torch.bfloat16)
    ones = torch.ones(4, 1, dtype=torch.bfloat16)
    out: list[Tensor | None] = []
    for seq in ({}, {"sequence_dim": 0}):
        column = tpcore.ColumnParallelLinear(1, 4, bias=False, gather_output=False, dtype=torch.bfloat16, **seq)
        row = tpcore.RowParallelLinear(4, 1, bias=False, input_is_parallel=True, dtype=torch.bfloat16, **seq)
        for layer in (column, row):
            layer.load_state_dict({"weight": mine})
        x = (ones[:1] if seq else ones).clone().requires_grad_()
        column(x).backward(ones)
        out += [x.grad, row(ones).detach()]

    norm = tpcore.LayerNorm(4, dtype=torch.bfloat16, sequence_parallel=True)
    norm(torch.randn(1, 4, dtype=torch.bfloat16)).backward(mine.expand(1, 4))
    assert norm.bias is not None
    row = tpcore.RowParallelLinear(
        4, 1, input_is_parallel=True, dtype=torch.bfloat16, skip_bias_add=True, sequence_dim=0
    )
    row(ones)[1].backward(mine[0])
    return [[] if t is None else t.flatten().tolist() for t in (*out, norm.bias.grad, row.bias.grad)]


def test_sums_over_ranks_are_taken_in_fp32(ranks: Callable[..., list[Any]]) -> None:
    """256 + 1 + 1 + 1 = 259, which rounds to 260; in bfloat16, which has no 257, one by one it is 256."""
    for column, row, column_seq, row_seq, norm, bias in ranks(Mesh({"dp": 1, "tp": 4}), _sums_of_256_and_ones):
        assert column == row == [260.0] * 4
        assert column_seq == row_seq == bias == [260.0]
        assert norm == [260.0] * 4


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("padding_idx", [0, 5, -1])
@each_rank(tp="tp")
def test_a_padding_row_that_was_changed_is_looked_up_and_gets_no_gradient(
    ctx: ParallelContext, tp: int, across: bool, padding_idx: int
) -> None:
    ids = torch.tensor([[0, 5, 7, 3], [0, 0, 5, 7]])
    layer = tpcore.ParallelEmbedding(8, 4, padding_idx, shard_across_embedding=across)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    y = layer(ids)
    assert (y == 2.0).all()
    y.sum().backward()
    grad = layer.shard_specs["weight"].unshard(list(ctx.comm("tp").all_gather(layer.weight.grad.unsqueeze(0), 0)))
    assert not grad[padding_idx].any()
    assert grad.sum() == 4 * (ids != padding_idx % 8).sum()


@each_rank(dp=1, tp=2)
def test_a_sequence_dim_may_be_counted_from_the_end(ctx: ParallelContext) -> None:
    """-2 of [4, 8, features] is 1, of the output of a look-up too."""
    found = []
    for dim in (1, -2):
        torch.manual_seed(0)
        embed = tpcore.ParallelEmbedding(16, 8, sequence_dim=dim)
        up = tpcore.ColumnParallelLinear(8, 16, gather_output=False, sequence_dim=dim)
        down = tpcore.RowParallelLinear(16, 8, input_is_parallel=True, sequence_dim=dim)
        y = down(up(embed(torch.randint(16, (4, 8)))))
        assert y.shape == (4, 4, 8)
        y.square().sum().backward()
        found.append([y, *(p.grad for layer in (embed, up, down) for p in layer.parameters())])
    assert all(map(torch.equal, *found))
