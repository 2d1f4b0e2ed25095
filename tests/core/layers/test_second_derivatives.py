"""Derivatives of derivatives equal those of plain torch, in double precision, at every tp."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import each_rank
from torch import Tensor, nn
from torch.autograd import forward_ad, functional

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.comm import mappings as ops
from tpcore.testing import run_ranks

LABELS = torch.tensor([1, -100, 9, 3])
at_tp_1_2_4 = pytest.mark.parametrize("tp", [1, 2, 4])


class Mlp(nn.Module):
    """Norm, column and row layer; maps [4, 8] to one number."""

    tokens: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh()).tanh().sum()

    def shard(self) -> None:
        self.norm = tpcore.LayerNorm.from_plain(self.norm, sequence_parallel=bool(self.tokens))
        self.up = tpcore.ColumnParallelLinear.from_plain(self.up, gather_output=False, **self.tokens)
        self.down = tpcore.RowParallelLinear.from_plain(self.down, input_is_parallel=True, **self.tokens)


class TokenMlp(Mlp):
    """The same with its tokens spread over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.tokens:
            return super().forward(x)
        comm = tpcore.current().comm("tp")
        y = self.down(self.up(self.norm(ops.scatter(x, comm, 0))).tanh())
        return ops.gather(y, comm, 0).tanh().sum()

    def shard(self) -> None:
        self.tokens = {"sequence_dim": 0}
        super().shard()


class Words(nn.Module):
    """q|k|v with fewer key heads than four ranks, a padded head, and the loss of its logits."""

    smoothing = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 10)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 2)) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return (q * k.tanh() * v).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(self.mixed(*self.qkv(x).split([8, 4, 4], -1)))
        return F.cross_entropy(self.head(h), LABELS, reduction="sum", label_smoothing=self.smoothing)

    def shard(self) -> None:
        qkv = tpcore.ParallelQKV.from_plain(self.qkv, 4, 2)
        out = tpcore.RowParallelLinear.from_plain(self.out, input_is_parallel=True)
        head = tpcore.ColumnParallelLinear.from_plain(self.head, gather_output=False, pad=True)
        self.qkv, self.out, self.head = qkv, out, head
        self.forward = lambda x: tpcore.parallel_cross_entropy(  # type: ignore[method-assign]
            head(out(self.mixed(*qkv(x)))), LABELS, self.smoothing
        ).sum()


class SmoothWords(Words):
    smoothing = 0.1


class Table(nn.Module):
    """An embedding's rows, weighted by the input."""

    columns = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return (self.table(torch.tensor([3, 0, 9, 3])) * x.tanh()).tanh().sum()

    def shard(self) -> None:
        self.table = tpcore.ParallelEmbedding.from_plain(self.table, pad=True, shard_across_embedding=self.columns)


class Columns(Table):
    columns = True


NETS = [Mlp, TokenMlp, Words, SmoothWords, Table, Columns]
at_nets = pytest.mark.parametrize("net", NETS)


def pair(make: type[nn.Module]) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    whole = make().double()
    sharded = copy.deepcopy(whole)
    sharded.shard()
    return whole, sharded, torch.randn(4, 8, dtype=torch.float64)


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    """Squares of all gradients. Its own gradients are complete on each rank, and its value is not."""
    slopes = torch.autograd.grad(net(x), [x, *net.parameters()], create_graph=True)
    return sum((slope.square().sum() for slope in slopes), torch.zeros(()))


@at_tp_1_2_4
@at_nets
@each_rank(tp="tp")
def test_hessians_products_with_them_and_a_penalty_on_all_gradients(
    ctx: ParallelContext, net: type[nn.Module], tp: int
) -> None:
    whole, sharded, x = pair(net)
    v = torch.randn_like(x)
    for derivative in (functional.hvp, functional.vhp, functional.jvp):
        torch.testing.assert_close(derivative(sharded, x, v), derivative(whole, x, v))
    want = functional.hessian(whole, x)
    assert want.any()
    torch.testing.assert_close(functional.hessian(sharded, x), want)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    for one, leaf in zip((whole, sharded), xs, strict=True):
        penalty(one, leaf).backward()
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    specs, full = tpcore.layers.shard_specs(sharded), dict(whole.named_parameters())
    for name, p in sharded.named_parameters():
        of = full[name.replace("qkv.qkv_proj", "qkv")].grad
        torch.testing.assert_close(p.grad, specs[name].shard(of, ctx.coord("tp"), tp))


@at_tp_1_2_4
@at_nets
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode(net: type[nn.Module], tp: int, grad: bool) -> None:
    def tangent(model: nn.Module, x: Tensor) -> Tensor:
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent

    def rank(ctx: ParallelContext) -> None:
        whole, sharded, x = pair(net)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(tangent(sharded, x), tangent(whole, x))

    with forward_ad.dual_level():  # a process has one, and so do all ranks
        run_ranks(Mesh({"tp": tp}), rank)


@at_nets
@each_rank(tp=1)
def test_transforms_of_torch_func(ctx: ParallelContext, net: type[nn.Module]) -> None:
    whole, sharded, x = pair(net)
    for of in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))):
        torch.testing.assert_close(of(sharded)(x), of(whole)(x))


class Tanh(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


@pytest.mark.parametrize("recompute", [True, False])
@each_rank(pp=2)
def test_through_a_pipeline(ctx: ParallelContext, recompute: bool) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Tanh(3, 3) for _ in range(4)).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    whole = functional.hessian(lambda x: nn.Sequential(*layers)(x).sum(), x)
    staged = tpcore.PipelinedLayers(layers, num_microbatches=2, recompute=recompute)
    torch.testing.assert_close(functional.hessian(lambda x: staged(x).sum(), x), whole)
