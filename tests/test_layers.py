"""Every layer equals its plain torch module, ten lines a test. The generated matrix covers the options."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpcore
from tpcore import Block, Mesh, ParallelContext
from tpcore.layers import linear
from tpcore.testing import matrix, run_ranks
from tpcore.testing.threads import ThreadComm

at_tp_1_2_4 = pytest.mark.parametrize("tp", [1, 2, 4])


class Conv1D(nn.Module):
    """As transformers has it: a linear layer whose weight is [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def equal(tp: int, plain: nn.Module, make: Callable[[], Any], x: Tensor) -> None:
    """``make()``, on every rank, has the output, the input gradient and the weight gradients of ``plain``."""
    plain, x = plain.double(), x.double() if x.is_floating_point() else x
    whole = x.clone().requires_grad_(x.is_floating_point())
    want = plain(whole)
    want.square().sum().backward()

    def rank(ctx: ParallelContext) -> None:
        layer, mine = make(), x.clone().requires_grad_(x.is_floating_point())
        y = layer(mine)
        y.square().sum().backward()
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(mine.grad, whole.grad)
        for name, p in layer.named_parameters():
            grad = layer.shard_specs[name].shard(plain.get_parameter(name).grad, ctx.coord("tp"), tp)
            torch.testing.assert_close(p.grad, grad)

    run_ranks(Mesh({"tp": tp}), rank)


@at_tp_1_2_4
def test_column(tp: int) -> None:
    plain = nn.Linear(6, 8)
    equal(tp, plain, lambda: tpcore.ColumnParallelLinear.from_plain(plain), torch.randn(5, 6))


@at_tp_1_2_4
def test_row(tp: int) -> None:
    plain = nn.Linear(8, 6)
    equal(tp, plain, lambda: tpcore.RowParallelLinear.from_plain(plain), torch.randn(5, 8))


@at_tp_1_2_4
def test_embedding(tp: int) -> None:
    plain = nn.Embedding(7, 4, padding_idx=1)
    ids = torch.tensor([[0, 6, 1], [3, 3, 2]])
    equal(tp, plain, lambda: tpcore.ParallelEmbedding.from_plain(plain, pad=True), ids)


@at_tp_1_2_4
@pytest.mark.parametrize(
    ("plain", "layer"), [(nn.LayerNorm(8), tpcore.LayerNorm), (nn.RMSNorm(8), tpcore.RMSNorm)]
)
def test_norm(tp: int, plain: nn.Module, layer: Any) -> None:
    equal(tp, plain, lambda: layer.from_plain(plain), torch.randn(5, 8))
    plain.zero_grad()


@at_tp_1_2_4
def test_conv1d(tp: int) -> None:
    up, down = Conv1D(24, 8), Conv1D(8, 24)
    x = torch.randn(5, 8)
    equal(tp, up, lambda: tpcore.ColumnParallelConv1D.from_plain(up, stride=3), x)
    equal(tp, down, lambda: tpcore.RowParallelConv1D.from_plain(down), torch.randn(5, 24))


@at_tp_1_2_4
def test_blocks_of_unequal_sizes(tp: int) -> None:
    """q|k|v in one weight: 8 query heads of 3 features, 4 key heads and 4 value heads."""
    plain, heads = nn.Linear(6, 48), (Block(24, 3), Block(12, 3), Block(12, 3))
    equal(tp, plain, lambda: tpcore.ColumnParallelLinear.from_plain(plain, blocks=heads), torch.randn(5, 6))
    plain = nn.Linear(48, 6)
    equal(tp, plain, lambda: tpcore.RowParallelLinear.from_plain(plain, blocks=heads), torch.randn(5, 48))


@at_tp_1_2_4
def test_blocks_that_several_ranks_hold(tp: int) -> None:
    """Two key heads of 3 features: at tp=4 ranks 0 and 1 hold the first, and both get its whole gradient."""
    plain, heads = nn.Linear(6, 30), (Block(24, 3), Block(6, 3, replicate=True))
    equal(tp, plain, lambda: tpcore.ColumnParallelLinear.from_plain(plain, blocks=heads), torch.randn(5, 6))


# -- attention ----------------------------------------------------------------------------------------
WIDTH, HEADS, HEAD = 8, 4, 2


class Attention(nn.Module):
    """Grouped-query attention; ``tp`` cuts it."""

    def __init__(self, kv_heads: int, fused: bool = False) -> None:
        super().__init__()
        sizes = [HEADS * HEAD, kv_heads * HEAD, kv_heads * HEAD]
        self.parts, self.fused, self.kv_heads = sizes, fused, kv_heads
        self.projections = nn.ModuleList(nn.Linear(WIDTH, n) for n in ([sum(sizes)] if fused else sizes))
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def cut(self) -> Attention:
        mine, plain = Attention(self.kv_heads, self.fused).double(), list(self.projections)
        qkv = tpcore.ParallelQKV.from_plain(plain[0] if self.fused else plain, HEADS, self.kv_heads)
        mine.projections = qkv
        mine.out = tpcore.RowParallelLinear.from_plain(self.out, input_is_parallel=True)
        return mine

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.projections, tpcore.ParallelQKV):
            q, k, v = self.projections(x)
        else:
            q, k, v = torch.cat([p(x) for p in self.projections], -1).split(self.parts, -1)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


@at_tp_1_2_4
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_qkv(tp: int, kv_heads: int, fused: bool) -> None:
    """At tp=4 two key heads are held by two ranks each, rank r holding head r // 2."""
    plain, x = Attention(kv_heads, fused).double(), torch.randn(2, 5, WIDTH).double().requires_grad_()
    plain(x).square().sum().backward()

    def rank(ctx: ParallelContext) -> None:
        ours, mine = plain.cut(), x.detach().clone().requires_grad_()
        ours(mine).square().sum().backward()
        torch.testing.assert_close(mine.grad, x.grad)
        specs = tpcore.shard_specs(ours)
        theirs = [p.grad for p in plain.parameters()]
        for (name, p), grad in zip(ours.named_parameters(), theirs, strict=True):
            torch.testing.assert_close(p.grad, specs[name].shard(grad, ctx.coord("tp"), tp))

    run_ranks(Mesh({"tp": tp}), rank)


def test_a_key_head_goes_to_consecutive_ranks() -> None:
    plain = nn.Linear(WIDTH, 2 * HEAD)

    def rank(ctx: ParallelContext) -> None:
        layer = tpcore.ParallelQKV.from_plain([nn.Linear(WIDTH, HEADS * HEAD), plain, plain], HEADS, 2)
        assert torch.equal(layer.k_proj.weight, plain.weight.chunk(2)[ctx.rank // 2])

    run_ranks(Mesh({"tp": 4}), rank)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fit"), [(6, 2, "1, 2, 6"), (12, 3, "1, 3, 6, 12"), (2, 1, "1, 2")]
)
def test_heads_that_do_not_fit(heads: int, kv_heads: int, fit: str) -> None:
    def rank(ctx: ParallelContext) -> None:
        message = f"tp=4 .* {heads} heads and {kv_heads} key and value heads fit tp={fit}$"
        with pytest.raises(ValueError, match=message):
            tpcore.ParallelQKV(24, heads, kv_heads)

    run_ranks(Mesh({"tp": 4}), rank)


# -- one copy of an input -------------------------------------------------------------------------------
class Reader(nn.Module):
    """Two projections of one tensor, called one after the other, as Hugging Face's attention and MLP do."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one, self.two = (tpcore.ColumnParallelLinear(WIDTH, WIDTH, gather_output=False) for _ in range(2))
        self.down = tpcore.RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True)
        if shared:
            tpcore.share_input(self, self.one, self.two)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.one(hidden_states)) * self.two(hidden_states))
        return out


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_shared_input_changes_no_number(recompute: bool, by_name: bool) -> None:
    def rank(ctx: ParallelContext) -> None:
        grads = []
        for shared in (False, True):
            torch.manual_seed(0)
            reader, x = Reader(shared), torch.randn(5, WIDTH).requires_grad_()
            call = (lambda t, r=reader: r(hidden_states=t)) if by_name else reader
            y = checkpoint(call, x, use_reentrant=False) if recompute else call(x)
            y.square().sum().backward()
            grads.append([x.grad, *(p.grad for p in reader.parameters())])
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)

    run_ranks(Mesh({"tp": 2}), rank)


class Block_(nn.Module):
    """One layer of a Llama: attention and a gated MLP, five projections of two tensors."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        size = {"gather_output": False, "bias": False}
        self.q, self.k, self.v = (tpcore.ColumnParallelLinear(WIDTH, WIDTH, **size) for _ in range(3))
        self.o = tpcore.RowParallelLinear(WIDTH, WIDTH, bias=False, input_is_parallel=True)
        self.mlp = Reader(shared)
        if shared:
            tpcore.share_input(self, self.q, self.k, self.v, argument="x")

    def forward(self, x: Tensor) -> Tensor:
        y = self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        out: Tensor = self.mlp(y)
        return out


@pytest.mark.parametrize(("shared", "wanted"), [(False, 16), (True, 10)])
def test_all_reduces_of_two_llama_blocks(shared: bool, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward 2 a block and backward 5, or 2; the embedding's sum and the head's input gradient come on top."""

    def build() -> nn.Module:
        head = tpcore.ColumnParallelLinear(WIDTH, 16, bias=False, gather_output=False)
        return nn.Sequential(tpcore.ParallelEmbedding(16, WIDTH), Block_(shared), Block_(shared), head)

    found = tpcore.explain(
        build, lambda model: model(torch.zeros(2, 4, dtype=torch.long)).square().sum(), tp=2
    )
    assert Counter(c.kind for c in found.collectives)["all_reduce"] == wanted
