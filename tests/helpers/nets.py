"""A small net with parameters of every kind, cut and plain, for tests of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore.layout.shard import Block, ShardSpec
from tpcore.runtime.context import ParallelContext


class Net(nn.Module):
    """Tied parameters, one that is never used, and an uneven vocabulary."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, sparse=sparse)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.unused = nn.Linear(4, 4)
        if not sparse:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.embed(ids))
        y: Tensor = self.head(h + self.down(F.gelu(self.up(h))))
        return y


class Heads(tpcore.ParallelModule):
    """A weight of 16 x 3. By default q of 4 heads, k and v of 2: on 4 ranks each key head is held twice."""

    def __init__(self, *blocks: Block, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        blocks = blocks or (Block(8, 2), Block(4, 2, replicate=True), Block(4, 2, replicate=True))
        self.shard_parameter("weight", ShardSpec((16, 3), 0, blocks), nn.init.normal_, dtype, None)


def plain_net(sparse: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(sparse).double()


def cut_net(full: dict[str, Tensor], sparse: bool = False) -> Any:
    """The net of these parameters, of which some are cut and some are not."""
    net: Any = Net(sparse).double()
    net.load_state_dict(full)
    net.embed = tpcore.ParallelEmbedding.from_plain(net.embed, pad=True)
    net.up = tpcore.ColumnParallelLinear.from_plain(net.up, gather_output=False)
    net.down = tpcore.RowParallelLinear.from_plain(net.down, input_is_parallel=True)
    net.head = tpcore.ColumnParallelLinear.from_plain(net.head, pad=True)
    net.unused = tpcore.ColumnParallelLinear.from_plain(net.unused)
    if not sparse:
        net.head.weight = net.embed.weight
    return net


def ids_of(seed: int = 0, batch: int = 4) -> Tensor:
    return torch.randint(10, (batch, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(net: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def assert_same_parameters(
    net: nn.Module,
    want: dict[str, Tensor],
    ctx: ParallelContext,
    of: Callable[[nn.Parameter], Any] = lambda p: p,
    rtol: float = 1e-10,
    atol: float = 1e-13,
) -> None:
    """This rank's shard of each, to the accuracy of float64 through a small net."""
    n, r = ctx.comm("tp").size, ctx.coord("tp")
    specs = tpcore.layers.shard_specs(net)
    for name, p in net.named_parameters():
        shard = specs[name].shard(want[name], r, n)
        torch.testing.assert_close(of(p), shard, rtol=rtol, atol=atol, msg=lambda m, k=name: f"{k}: {m}")


def widen_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon orthogonalizes in bfloat16 alone, by ``bfloat16`` or, from torch 2.15 on, ``to``: here in that of
    the gradient, in which sums in another order show no more than rounding."""
    to = Tensor.to

    def unless_narrow(t: Tensor, *args: Any, **options: Any) -> Tensor:
        return t.clone() if options.get("dtype") is torch.bfloat16 else to(t, *args, **options)

    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    monkeypatch.setattr(Tensor, "to", unless_narrow)
