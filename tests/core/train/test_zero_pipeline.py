"""Zero1 under a pipeline: every step is that of the plain optimizer, and its checkpoint opens elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pipelines import backward, batch_of, cut, plain, share_of
from torch import nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.testing import run_ranks

AdamW = torch.optim.AdamW


def staged(ctx: ParallelContext, *, tied: bool = True) -> nn.Module:
    model = cut(4, ctx, tied=tied)
    model.layers = tpcore.PipelinedLayers(model.layers, 2, shared=["mix"])
    return model


def seen_by_one(layers: int) -> list[float]:
    """Loss and norm of six steps in one process."""
    dense, seen = plain(layers, tied=True), []
    optimizer = AdamW(dense.named_parameters(), lr=0.02)
    for step in range(6):
        optimizer.zero_grad()
        loss = dense(**batch_of(8, step))
        loss.backward()
        seen += [loss.item(), nn.utils.clip_grad_norm_(dense.parameters(), 0.5).item()]
        optimizer.step()
    return seen


def trained(model: nn.Module, optimizer: Any, ctx: ParallelContext, engine: str, steps: range) -> list[float]:
    seen = []
    for step in steps:
        optimizer.zero_grad()
        loss = backward(model, engine, 2, share_of(batch_of(8, step), ctx)).reshape(1)
        seen.append((ctx.comm("dp").all_reduce(loss) / ctx.comm("dp").size).item())
        seen.append(tpcore.optimizer_step(optimizer, max_norm=0.5).item())
    return seen


@pytest.mark.parametrize(
    ("engine", "tp", "make"),
    [
        ("recomputed", 1, partial(Zero1, AdamW, bucket_mb=1e-2)),
        ("lockstep", 2, partial(Zero1, AdamW, bucket_mb=1e-2)),
        ("recomputed", 2, AdamW),
    ],
    ids=["recomputed", "lockstep", "optimizer of torch"],
)
def test_steps_of_a_pipeline_and_its_checkpoint_elsewhere(
    tmp_path: Path, engine: str, tp: int, make: Callable[..., Any]
) -> None:
    """Loss and norm of every step, at pp 2 x dp 2, then at pp 1. 1e-9: rounding, grown by AdamW."""
    want = seen_by_one(4)

    def first(ctx: ParallelContext) -> list[float]:
        model = staged(ctx)
        made = make(model.named_parameters(), lr=0.02)
        seen = trained(model, made, ctx, engine, range(4))
        tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": made}, tmp_path / "c")
        return seen + trained(model, made, ctx, engine, range(4, 6))

    for got in run_ranks(Mesh({"pp": 2, "dp": 2, "tp": tp}), first):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)

    def second(ctx: ParallelContext) -> list[float]:
        model = staged(ctx)
        made = make(model.named_parameters(), lr=0.1)
        made.load_state_dict(tpcore.checkpoint.load(tmp_path / "c", model)["optimizer"])
        return trained(model, made, ctx, "recomputed", range(4, 6))

    for there in ({"pp": 1, "dp": 2, "tp": 1}, {"pp": 4, "dp": 1, "tp": 1}):
        for got in run_ranks(Mesh(there), second):
            torch.testing.assert_close(got, want[8:], rtol=1e-9, atol=1e-9)
