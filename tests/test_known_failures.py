"""Eight things that existing tensor-parallel libraries get wrong, each by name.

Most are points of the matrix as well; here they are spelled out so that a regression says what it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore.comm import mappings as ops
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

Ranks = Callable[..., list[Any]]
at_every_tp = pytest.mark.parametrize("tp", [1, 2, 4])


def small_integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """-1, 0 and 1: sums of a few dozen products are exact in every dtype."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def load(layer: nn.Module, full: dict[str, Tensor], ctx: ParallelContext) -> None:
    n, r = ctx.comm("tp").size, ctx.coord("tp")
    layer.load_state_dict({k: s.shard(full[k], r, n) for k, s in tpcore.shard_specs(layer).items()})


def gathered(layer: nn.Module, name: str, ctx: ParallelContext, of: Callable[[Tensor], Tensor | None]) -> Tensor:
    """The full parameter, or its full gradient, from all ranks."""
    p, comm = layer.get_parameter(name), ctx.comm("tp")
    value = of(p)
    assert value is not None
    shards = list(comm.all_gather(value.detach().unsqueeze(0), 0))
    return tpcore.shard_specs(layer)[name].unshard(shards)


# -- 1 -----------------------------------------------------------------------------------------------------


def _column_input_grad(ctx: ParallelContext, reduce_dtype: torch.dtype, full: dict[str, Tensor]) -> Tensor:
    layer = tpcore.ColumnParallelLinear(8, 16, gather_output=False, dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    load(layer, full, ctx)
    x = small_integers(4, 8, dtype=torch.bfloat16).requires_grad_()
    grad = small_integers(4, 16, seed=1, dtype=torch.bfloat16)
    layer(x).backward(grad.chunk(ctx.comm("tp").size, -1)[ctx.coord("tp")])
    assert x.grad is not None
    return x.grad


@at_every_tp
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_1_bf16_column_layer_keeps_the_all_reduce_of_its_input_gradient(
    ranks: Ranks, tp: int, reduce_dtype: torch.dtype
) -> None:
    plain = nn.Linear(8, 16, dtype=torch.bfloat16)
    full = {
        "weight": small_integers(16, 8, seed=2, dtype=torch.bfloat16),
        "bias": torch.zeros(16, dtype=torch.bfloat16),
    }
    plain.load_state_dict(full)
    x = small_integers(4, 8, dtype=torch.bfloat16).requires_grad_()
    plain(x).backward(small_integers(4, 16, seed=1, dtype=torch.bfloat16))
    assert x.grad is not None
    assert x.grad.any()
    for got in ranks(Mesh({"dp": 1, "tp": tp}), _column_input_grad, reduce_dtype, full):
        assert torch.equal(got, x.grad)


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
        4,
        1,
        input_is_parallel=True,
        dtype=torch.bfloat16,
        skip_bias_add=True,
        sequence_dim=0,
    )
    row(ones)[1].backward(mine[0])
    return [[] if t is None else t.flatten().tolist() for t in (*out, norm.bias.grad, row.bias.grad)]


def test_1_and_takes_such_sums_in_fp32(ranks: Ranks) -> None:
    """256 + 1 + 1 + 1 = 259, which rounds to 260; in bfloat16, which has no 257, one by one it is 256."""
    for column, row, column_seq, row_seq, norm, bias in ranks(Mesh({"dp": 1, "tp": 4}), _sums_of_256_and_ones):
        assert column == row == [260.0] * 4
        assert column_seq == row_seq == bias == [260.0]
        assert norm == [260.0] * 4


# -- 2 -----------------------------------------------------------------------------------------------------


def _smoothed(ctx: ParallelContext, logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    mine = logits.chunk(ctx.comm("tp").size, -1)[ctx.coord("tp")].clone().requires_grad_()
    loss = tpcore.parallel_cross_entropy(mine, target, smoothing)
    loss.mean().backward()
    assert mine.grad is not None
    return loss.detach(), ctx.comm("tp").all_gather(mine.grad, -1)


@at_every_tp
@pytest.mark.parametrize("smoothing", [0.1, 0.5, 1.0])
def test_2_label_smoothing_equals_cross_entropy(ranks: Ranks, tp: int, smoothing: float) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 16, dtype=torch.float64), torch.randint(16, (6,))
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(whole, target, label_smoothing=smoothing, reduction="none")
    want.mean().backward()
    for loss, grad in ranks(Mesh({"dp": 1, "tp": tp}), _smoothed, logits, target, smoothing):
        # a log-sum-exp of 16 terms in float64, of logits below 4
        torch.testing.assert_close(loss, want.detach(), rtol=0, atol=1e-14)
        torch.testing.assert_close(grad, whole.grad, rtol=0, atol=1e-15)


# -- 3 -----------------------------------------------------------------------------------------------------


@at_every_tp
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_3_an_embedding_keeps_its_dtype(tp: int, across: bool, dtype: torch.dtype) -> None:
    def rank(ctx: ParallelContext) -> None:
        layer = tpcore.ParallelEmbedding(8, 4, dtype=dtype, shard_across_embedding=across)
        y = layer(torch.arange(8))
        y.sum().backward()
        assert (y.dtype, layer.weight.dtype, layer.weight.grad.dtype) == (dtype,) * 3
        assert torch.equal(y, gathered(layer, "weight", ctx, lambda p: p))

    run_ranks(Mesh({"dp": 1, "tp": tp}), rank)


# -- 4 -----------------------------------------------------------------------------------------------------


@at_every_tp
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("padding_idx", [0, 5, -1])
def test_4_padding_idx_is_honoured_zero_included(tp: int, across: bool, padding_idx: int) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(8, 4, padding_idx=padding_idx)
    ids = torch.tensor([[0, 5, 7, 3], [0, 0, 5, 7]])
    plain(ids).square().sum().backward()
    assert not plain.weight[padding_idx].any()

    def rank(ctx: ParallelContext) -> None:
        torch.manual_seed(0)
        layer = tpcore.ParallelEmbedding(8, 4, padding_idx, shard_across_embedding=across)
        assert torch.equal(gathered(layer, "weight", ctx, lambda p: p), plain.weight)
        layer(ids).square().sum().backward()
        assert torch.equal(gathered(layer, "weight", ctx, lambda p: p.grad), plain.weight.grad)
        # a padding row that was changed is looked up as it is, and still gets no gradient
        with torch.no_grad():
            layer.weight.fill_(2.0)
        layer.zero_grad()
        y = layer(ids)
        assert (y == 2.0).all()
        y.sum().backward()
        grad = gathered(layer, "weight", ctx, lambda p: p.grad)
        assert not grad[padding_idx].any()
        assert grad.sum() == 4 * (ids != padding_idx % 8).sum()

    run_ranks(Mesh({"dp": 1, "tp": tp}), rank)


# -- 5 -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm, a sharded MLP and a residual, all of it inside a sequence-parallel region along ``dim``."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        seq: dict[str, Any] = {}
        if dim is not None:
            seq = {"sequence_dim": dim}
        self.embed = tpcore.ParallelEmbedding(16, 8, dtype=torch.float64, **seq)
        self.norm = tpcore.LayerNorm(8, dtype=torch.float64, sequence_parallel=dim is not None)
        self.up = tpcore.ColumnParallelLinear(8, 16, gather_output=False, dtype=torch.float64, **seq)
        self.down = tpcore.RowParallelLinear(16, 8, input_is_parallel=True, dtype=torch.float64, **seq)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        y: Tensor = h + self.down(F.gelu(self.up(self.norm(h))))
        return y


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, dtype=torch.float64)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.up = nn.Linear(8, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 8, dtype=torch.float64)

    forward = Block.forward


def _sequence_parallel_block(
    ctx: ParallelContext, dim: int, full: dict[str, Tensor], ids: Tensor, grad: Tensor
) -> tuple[tuple[int, ...], Tensor, dict[str, Tensor]]:
    block, comm = Block(dim), ctx.comm("tp")
    load(block, full, ctx)
    y = block(ids)
    out = ops.gather(y, comm, dim)
    out.backward(grad)
    grads = {name: gathered(block, name, ctx, lambda p: p.grad) for name in full}
    return tuple(y.shape), out.detach(), grads


@at_every_tp
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_5_sequence_parallel_along_any_dim(ranks: Ranks, tp: int, dim: int) -> None:
    torch.manual_seed(0)
    plain = PlainBlock()
    ids, grad = torch.randint(16, (4, 8)), torch.randn(4, 8, 8, dtype=torch.float64)
    want = plain(ids)
    want.backward(grad)
    dim_of_ids = dim if dim >= 0 else -1
    assert dim_of_ids in (0, 1, -1)
    shape = [4, 8, 8]
    shape[dim] //= tp
    args = (dim, plain.state_dict(), ids, grad)
    for local, out, grads in ranks(Mesh({"dp": 1, "tp": tp}), _sequence_parallel_block, *args):
        assert list(local) == shape
        # float64, sums of at most 32 terms near 1
        torch.testing.assert_close(out, want.detach(), rtol=0, atol=1e-13)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# -- 6 -----------------------------------------------------------------------------------------------------


@at_every_tp
@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 3, 4), (2, 1, 3, 2), ()])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_6_any_number_of_leading_dims_and_any_memory_order(tp: int, lead: tuple[int, ...], layout: str) -> None:
    plain = {"column": nn.Linear(8, 16), "row": nn.Linear(8, 16)}
    for seed, layer in enumerate(plain.values()):
        nn.init._no_grad_uniform_(layer.bias, 0, 0)
        layer.weight.data.copy_(small_integers(16, 8, seed=seed))

    def arranged(x: Tensor) -> Tensor:
        if layout == "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        return x[..., :1].expand_as(x) if layout == "expanded" else x

    def grads(layer: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = arranged(small_integers(*lead, 8, seed=5)).requires_grad_()
        y = layer(x)
        assert y.shape == (*lead, 16)
        y.backward(arranged(small_integers(*lead, 16, seed=6)))
        return y.detach(), x.grad, layer.weight.grad

    want = {name: grads(layer) for name, layer in plain.items()}

    def rank(ctx: ParallelContext) -> None:
        made = {"column": tpcore.ColumnParallelLinear(8, 16), "row": tpcore.RowParallelLinear(8, 16)}
        for name, layer in made.items():
            load(layer, plain[name].state_dict(), ctx)
            y, gx, _ = grads(layer)
            assert torch.equal(y, want[name][0])
            assert gx is not None
            assert torch.equal(gx, want[name][1])
            assert torch.equal(gathered(layer, "weight", ctx, lambda p: p.grad), want[name][2])

    run_ranks(Mesh({"dp": 1, "tp": tp}), rank)


# -- 7 -----------------------------------------------------------------------------------------------------


@at_every_tp
@pytest.mark.parametrize("norm_type", [2, float("inf"), "inf"])
def test_7_clip_grad_norm_takes_a_generator_and_infinity(tp: int, norm_type: float | str) -> None:
    torch.manual_seed(0)
    plain = PlainBlock()
    ids = torch.randint(16, (4, 8))
    plain(ids).sum().backward()
    reference = copy.deepcopy(plain)
    for p, q in zip(reference.parameters(), plain.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, float(norm_type))

    def rank(ctx: ParallelContext) -> None:
        block = Block(None)
        load(block, plain.state_dict(), ctx)
        block(ids).sum().backward()
        norm = tpcore.clip_grad_norm((p for p in block.parameters()), 0.5, norm_type)
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
        for name, p in reference.named_parameters():
            torch.testing.assert_close(gathered(block, name, ctx, lambda p: p.grad), p.grad, rtol=1e-9, atol=1e-12)

    run_ranks(Mesh({"dp": 1, "tp": tp}), rank)


# -- 8 -----------------------------------------------------------------------------------------------------


@at_every_tp
@pytest.mark.parametrize("gather_output", [False, True])
def test_8_initial_bias_is_that_of_linear_and_differs_between_shards(tp: int, gather_output: bool) -> None:
    torch.manual_seed(0)
    column, row = nn.Linear(8, 16), nn.Linear(16, 8)

    def rank(ctx: ParallelContext) -> list[float]:
        torch.manual_seed(0)
        ours = (
            tpcore.ColumnParallelLinear(8, 16, gather_output=gather_output),
            tpcore.RowParallelLinear(16, 8),
        )
        for layer, plain in zip(ours, (column, row), strict=True):
            for name, p in plain.named_parameters():
                assert torch.equal(gathered(layer, name, ctx, lambda p: p), p)
        bias: list[float] = ours[0].bias.tolist()
        assert len(bias) == 16 // tp  # cut whatever gather_output says, so that checkpoints do not depend on it
        return bias

    values = [v for shard in run_ranks(Mesh({"dp": 1, "tp": tp}), rank) for v in shard]
    assert len(set(values)) == 16
