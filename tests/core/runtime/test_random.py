"""Random numbers: the same in replicated regions, different in sharded ones, replayed bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import each_rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

Ranks = Callable[..., list[Any]]
MESH = Mesh({"dp": 2, "tp": 2})


def _draws(ctx: ParallelContext, seed: int) -> list[list[float]]:
    """Replicated, sharded, replicated, sharded twice."""
    tpcore.random.manual_seed(seed)
    out = [torch.rand(4)]
    with tpcore.random.sharded():
        out.append(torch.rand(4))
    out.append(torch.rand(4))
    ctx.world.all_reduce(torch.ones(1))
    with tpcore.random.sharded():
        out.append(torch.rand(4))
        out.append(torch.rand(4))
    return [x.tolist() for x in out]


def test_the_same_where_replicated_and_different_where_sharded(ranks: Ranks) -> None:
    got = ranks(Mesh({"dp": 1, "tp": 4}), _draws, 7)
    for where in (0, 2):
        assert all(one[where] == got[0][where] for one in got)
    sharded = [tuple(one[where]) for one in got for where in (1, 3, 4)]
    assert len(set(sharded)) == len(sharded)
    assert len({v for draw in sharded for v in draw}) == 4 * len(sharded)  # nor one stream shifted against another
    assert got == ranks(Mesh({"dp": 1, "tp": 4}), _draws, 7)
    assert got != ranks(Mesh({"dp": 1, "tp": 4}), _draws, 8)


def fails_inside(draws: int) -> None:
    with tpcore.random.sharded():
        torch.rand(draws)
        with tpcore.random.sharded():
            torch.rand(2)
            raise KeyError


@each_rank(tp=2)
def test_nested_regions_and_errors_leave_the_stream_in_place(ctx: ParallelContext) -> None:
    tpcore.random.manual_seed(1)
    with tpcore.random.sharded():
        pass
    want = torch.rand(3)
    tpcore.random.manual_seed(1)
    with pytest.raises(KeyError):
        fails_inside(1000)
    assert torch.equal(torch.rand(3), want)


def _resumed(ctx: ParallelContext) -> tuple[list[float], list[float]]:
    def two() -> list[float]:
        with tpcore.random.sharded():
            inside = torch.rand(2)
        return [*inside.tolist(), *torch.rand(2).tolist()]

    tpcore.random.manual_seed(5)
    torch.rand(3)
    file = io.BytesIO()
    torch.save(tpcore.random.get_state(), file)
    want = two()
    tpcore.random.manual_seed(99)
    torch.rand(7)
    file.seek(0)
    tpcore.random.set_state(torch.load(file, weights_only=True))
    return want, two()


def test_state_is_saved_and_restored(ranks: Ranks) -> None:
    for want, got in ranks(MESH, _resumed):
        assert got == want


class Block(nn.Module):
    """An MLP with dropout on what is cut and on what is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.up = tpcore.ColumnParallelLinear(8, 16, gather_output=False)
        self.down = tpcore.RowParallelLinear(16, 8, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        with tpcore.random.sharded():
            h = F.dropout(h, 0.5)
        return x + F.dropout(self.down(h), 0.5)


RECOMPUTE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "none": lambda block, x: block(x),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "with new numbers": lambda block, x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False),
}


def _gradients(ctx: ParallelContext, recompute: str) -> tuple[list[Tensor], Tensor]:
    tpcore.random.manual_seed(11)
    blocks = nn.ModuleList(Block() for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)
    y = x
    for block in blocks:
        y = RECOMPUTE[recompute](block, y)
    y.square().sum().backward()
    grads = [p.grad for p in blocks.parameters()]
    assert x.grad is not None
    assert all(g is not None for g in grads)
    return [x.grad, y.detach(), *grads], torch.rand(3)  # type: ignore[list-item]


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_activation_checkpointing_gives_the_same_bits(ranks: Ranks, recompute: str) -> None:
    plain = ranks(MESH, _gradients, "none")
    again = ranks(MESH, _gradients, recompute)
    for (want, after), (got, then) in zip(plain, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert torch.equal(after, then)


def test_and_other_bits_where_the_numbers_are_not_replayed() -> None:
    plain, other = (run_ranks(MESH, lambda ctx, r=r: _gradients(ctx, r)) for r in ("none", "with new numbers"))
    assert torch.equal(plain[0][0][1], other[0][0][1])  # the output is from before
    assert not torch.equal(plain[0][0][0], other[0][0][0])


def test_sharded_numbers_differ_over_cp_too() -> None:
    def draws(ctx: ParallelContext) -> tuple[float, float]:
        tpcore.random.manual_seed(0)
        with tpcore.random.sharded():
            own = torch.rand(1).item()
        return own, torch.rand(1).item()

    found = run_ranks(Mesh({"dp": 2, "cp": 2, "tp": 2}), draws)
    assert len({own for own, _ in found}) == 4  # dp ranks were seeded alike
    assert len({after for _, after in found}) == 1
