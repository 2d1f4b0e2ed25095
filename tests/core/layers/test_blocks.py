"""With ``reproducible`` layers have the same bits at every degree: outputs, and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore import Block
from tpcore.layers import ColumnParallelConv1D, ParallelQKV, RowParallelConv1D
from tpcore.layers.blocks import products
from tpcore.layers.loss import parallel_cross_entropy
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext, current
from tpcore.testing import run_ranks

MOST = 8
DEGREES = (1, 2, 4, 8)


class Pair(nn.Module):
    """A column layer and a row layer around a function of the features."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype, blocks: Any = 1, seq: int | None = None) -> None:
        super().__init__()
        self.up = tpcore.ColumnParallelLinear(
            hidden, inner, gather_output=False, dtype=dtype, blocks=blocks, sequence_dim=seq
        )
        self.down = tpcore.RowParallelLinear(
            inner // (1 if blocks == 1 else 2), hidden, input_is_parallel=True, dtype=dtype, sequence_dim=seq
        )
        self.gated = blocks != 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.gated:
            gate, y = y.chunk(2, -1)
            return self.down(F.silu(gate) * y)
        return self.down(F.silu(y))


class GPT2(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = ColumnParallelConv1D(32, 96, gather_output=False, dtype=dtype, blocks=3)
        self.down = RowParallelConv1D(96, 32, input_is_parallel=True, dtype=dtype, blocks=(Block(32),) * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        self.qkv = ParallelQKV(32, 16, 8, 4, dtype=dtype, bias=True, **options)
        self.out = tpcore.RowParallelLinear(64, 32, input_is_parallel=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Shared(nn.Module):
    """Two column layers read one copy of the input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.up = (tpcore.ColumnParallelLinear(32, 128, gather_output=False, dtype=dtype) for _ in range(2))
        self.down = tpcore.RowParallelLinear(128, 32, input_is_parallel=True, dtype=dtype)
        tpcore.layers.share_input(self, self.gate, self.up, argument="x")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Words(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = tpcore.ParallelEmbedding(64, 32, 3, dtype=dtype)
        self.head = tpcore.ColumnParallelLinear(32, 64, bias=False, gather_output=False, dtype=dtype)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 1000).long() % 61
        return parallel_cross_entropy(self.head(self.table(ids) + x), ids, 0.1, vocab_size=61)


KINDS = {
    "gathered": lambda dtype: tpcore.ColumnParallelLinear(32, 24, dtype=dtype),
    "tiny columns": lambda dtype: Pair(24, 8, dtype),
    "pair": lambda dtype: Pair(32, 128, dtype),
    "gate and up in one": lambda dtype: Pair(32, 1024, dtype, (Block(512), Block(512))),
    "sequence parallel": lambda dtype: Pair(32, 128, dtype, seq=1),
    "conv1d": GPT2,
    "one input for two": Shared,
    "heads": Attention,
    "heads, fused": lambda dtype: Attention(dtype, fused=True),
    "words": Words,
}


def computed(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients, whole."""
    torch.manual_seed(0)
    layer, x = KINDS[kind](dtype), torch.randn(4, 16, 32 if kind != "tiny columns" else 24).to(dtype)
    seq, tp = kind == "sequence parallel", current().comm("tp")
    x = (tp.split(x, 1) if seq else x).requires_grad_()
    y = layer(x)
    weights = torch.arange(y.numel() * (tp.size if seq else 1), dtype=y.dtype).cos()
    weights = weights.view(*y.shape[:1], -1, *y.shape[2:])
    (y * (tp.split(weights, 1) if seq else weights)).sum().backward()
    named = {n: m.sharding_of(n.rpartition(".")[2]) for n, m in _owners(layer)}
    grads = {n: p.grad if named.get(n) is None else named[n].whole(p.grad) for n, p in layer.named_parameters()}
    found = {"y": y.detach(), "x": x.grad}
    return {**{n: tp.all_gather(t, 1) if seq else t for n, t in found.items()}, **grads}


def _owners(layer: nn.Module) -> Any:
    for prefix, module in layer.named_modules():
        for name in getattr(module, "shard_specs", ()):
            yield f"{prefix}.{name}".lstrip("."), module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_the_same_bits_at_every_degree(kind: str, dtype: torch.dtype) -> None:
    found = {}
    for tp in DEGREES:
        every = run_ranks(Mesh({"tp": tp}), lambda ctx: computed(kind, dtype), reproducible=MOST)
        for other in every[1:]:
            assert all(torch.equal(other[name], t) for name, t in every[0].items())
        found[tp] = every[0]
    for tp in DEGREES[1:]:
        differ = [name for name, t in found[1].items() if not torch.equal(t, found[tp][name])]
        assert differ == [], f"tp={tp}"


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_it_computes_without(kind: str) -> None:
    """In float64, up to the order of addition."""
    want = run_ranks(Mesh({"tp": 1}), lambda ctx: computed(kind, torch.float64))[0]
    for tp in (1, 4):
        got = run_ranks(Mesh({"tp": tp}), lambda ctx: computed(kind, torch.float64), reproducible=MOST)[0]
        for name, t in want.items():
            # roundings of sums of up to 1024 numbers near 1
            torch.testing.assert_close(got[name], t, rtol=1e-9, atol=1e-11)


REFUSED = {
    "features": (lambda: tpcore.ColumnParallelLinear(32, 20), "20 of .* are not 8 equal blocks.*pad them to 24"),
    "inputs": (lambda: tpcore.RowParallelLinear(12, 32), "12 of .* are not 8 equal blocks.*pad them to 16"),
    "words": (lambda: tpcore.ParallelEmbedding(50, 32, pad=True), "50 of .* pad them to 56"),
    "copies": (
        lambda: tpcore.ColumnParallelLinear(32, 16, blocks=(Block(16, 8, True),)),
        "2 of tp=4 ranks have the same features.*take tp up to 2",
    ),
    "norm": (lambda: tpcore.LayerNorm(32, sequence_parallel=True), "knows no dim of the tokens"),
    "few entries": (
        lambda: Pair(32, 8, torch.float32)(torch.randn(3, 1, 32)),
        r"\[?3, 1, 2\]?\) has 3 entries, and reproducible= takes multiples of 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_have_the_same_bits_is_refused_on_every_rank(case: str) -> None:
    make, message = REFUSED[case]

    def refused(ctx: ParallelContext) -> bool:
        with pytest.raises(ValueError, match=message):
            make()
        return True

    assert run_ranks(Mesh({"tp": 4}), refused, reproducible=MOST) == [True] * 4


def test_second_derivatives_have_the_same_bits() -> None:
    def second(ctx: ParallelContext) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, 16, 32, requires_grad=True)
        (g,) = torch.autograd.grad(Pair(32, 128, torch.float32)(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), x)[0]

    found = [run_ranks(Mesh({"tp": tp}), second, reproducible=MOST)[0] for tp in DEGREES]
    assert all(torch.equal(t, found[0]) for t in found)


@pytest.mark.parametrize(("batch", "rows"), [(2, 5), (0, 5), (2, 0)])
def test_products_of_matrices_are_those_of_matmul(batch: int, rows: int) -> None:
    """Of parts that begin within a cache line, and are copied; of none at all; and their second derivatives."""
    x = torch.randn(batch, 3, rows, 9, dtype=torch.float64)[..., 1:8].requires_grad_()
    y = torch.randn(3, 7, 5, dtype=torch.float64)[..., 1:].requires_grad_()

    def second(product: Any) -> list[Tensor]:
        out = product(x, y)
        (g,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
        return [out, g, *torch.autograd.grad((g * g).sum(), (x, y))]

    for found, want in zip(second(products), second(torch.matmul), strict=True):
        torch.testing.assert_close(found, want)
