"""Ranks that have other tokens of one sequence: the axis, and models on it equal to the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.worlds import each_rank
from torch import nn

import tpcore
from tpcore import Mesh, Zero1
from tpcore.testing import run_ranks

STEPS = 3


@each_rank(dp=2, cp=2, tp=2)
def test_data_axes_are_those_of_a_mean_of_gradients(ctx: tpcore.ParallelContext) -> None:
    assert (ctx.batch.size, ctx.data.size) == (2, 4)
    assert ctx.index(ctx.data) == 2 * ctx.coord("dp") + ctx.coord("cp")
    assert ctx.index(ctx.batch) == ctx.coord("dp")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _rows(step: int) -> torch.Tensor:
    return torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, part: slice, norm: object) -> list[torch.Tensor]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        net(_rows(step)[part]).square().mean().backward()
        norms.append(norm(optimizer))  # type: ignore[operator]
    return norms


@pytest.mark.parametrize("zero1", [False, True])
def test_steps_are_those_of_one_process_and_files_know_nothing_of_the_axis(zero1: bool, tmp_path: Path) -> None:
    """dp and cp ranks with other rows each: clipping, a step, the optimizer's state, a checkpoint."""
    whole = _net()
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01)

    def stepped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
        optimizer.step()
        return norm

    want = _train(whole, plain, slice(None), stepped)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = _net()
        named = list(net.named_parameters())
        return net, Zero1(torch.optim.AdamW, named, lr=0.01) if zero1 else torch.optim.AdamW(named, lr=0.01)

    def rank(ctx: tpcore.ParallelContext) -> None:
        net, optimizer = make()
        at = 2 * ctx.index(ctx.data)
        norms = _train(net, optimizer, slice(at, at + 2), lambda o: tpcore.optimizer_step(o, max_norm=0.01))
        torch.testing.assert_close(norms, want, rtol=1e-12, atol=1e-12)  # float64, other order of sums
        torch.testing.assert_close(list(net.parameters()), list(whole.parameters()), rtol=1e-10, atol=1e-10)
        tpcore.checkpoint.save({"model": net.state_dict(), "optimizer": optimizer}, tmp_path / "saved")

    def again(ctx: tpcore.ParallelContext) -> None:
        net, optimizer = make()
        tpcore.checkpoint.load(tmp_path / "saved", net, optimizer=optimizer)
        torch.testing.assert_close(list(net.parameters()), list(whole.parameters()), rtol=1e-10, atol=1e-10)

    run_ranks(Mesh({"dp": 2, "cp": 2}), rank)
    for mesh in ({"dp": 1}, {"dp": 1, "cp": 2, "tp": 2}, {"dp": 3}):
        run_ranks(Mesh(mesh), again)
