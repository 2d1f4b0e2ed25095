"""Training resumed at another degree goes on along the same loss curve."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from nets import Net, ids_of, loss_of

import tpcore
from tpcore.checkpoint import load, save
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

STEPS = 3


def train(ctx: ParallelContext, path: Path, segment: int, resume: bool, steps: int = STEPS) -> list[float]:
    tpcore.random.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    if resume:
        rest = load(path / str(segment - 1), net)
        optimizer.load_state_dict(rest["optimizer"])
        scheduler.load_state_dict(rest["scheduler"])
        assert rest["segment"] == segment - 1
    losses = []
    for step in range(segment * STEPS, segment * STEPS + steps):
        optimizer.zero_grad()
        loss = loss_of(net, ids_of(step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "segment": segment}
    save({**state, "scheduler": scheduler.state_dict()}, path / str(segment), async_save=segment == 1)
    tpcore.checkpoint.wait()
    return losses


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_one_two_four_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    want = run_ranks(Mesh({"tp": 1}), lambda ctx: train(ctx, tmp_path / "whole", 0, False, 4 * STEPS))[0]
    curve: list[float] = []
    for segment, tp in enumerate((1, 2, 4, 1)):
        losses = run_ranks(
            Mesh({"tp": tp}),
            lambda ctx: train(ctx, tmp_path, segment, segment > 0),  # noqa: B023
        )
        assert all(of_rank == losses[0] for of_rank in losses)
        curve += losses[0]
    # float64: sums over ranks are taken in another order, and Adam divides by roots of small numbers
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(want), rtol=1e-6, atol=1e-9)
