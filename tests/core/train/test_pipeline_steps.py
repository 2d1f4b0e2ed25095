"""Steps of stages, of as many and of different numbers of layers: they, and checkpoints, are those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pipelines import backward, batch_of, cut, plain, share_of
from helpers.worlds import each_rank
from torch import nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.layout.layout import Layout, Slot
from tpcore.testing import run_ranks
from tpcore.train.pipeline.alike import ends_of

AdamW = torch.optim.AdamW
SMALL = partial(Zero1, AdamW, bucket_mb=1e-2)


def staged(ctx: ParallelContext, layers: int = 4, per_stage: Any = None, *, tied: bool = True) -> nn.Module:
    model = cut(layers, ctx, tied=tied)
    per_stage = None if ctx.mesh.axes["pp"] == 1 else per_stage
    model.layers = tpcore.PipelinedLayers(model.layers, 2, shared=["mix"], layers_per_stage=per_stage)
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
    ("engine", "pp", "make", "layers", "per_stage", "then"),
    [
        ("lockstep", 2, SMALL, 4, None, None),
        ("recomputed", 2, AdamW, 4, None, None),
        ("recomputed", 2, SMALL, 5, (4, 1), (2, 3)),
        ("lockstep", 2, SMALL, 5, "balanced", (1, 4)),
        ("recomputed", 3, SMALL, 5, (1, 1, 3), "balanced"),
    ],
)
def test_steps_and_a_checkpoint_of_other_stages(
    tmp_path: Path, engine: str, pp: int, make: Callable[..., Any], layers: int, per_stage: Any, then: Any
) -> None:
    """At pp x tp 2; then at pp x dp 2 with other stages, and at one; of four layers at four."""
    want = seen_by_one(layers)

    def first(ctx: ParallelContext) -> list[float]:
        model = staged(ctx, layers, per_stage)
        made = make(model.named_parameters(), lr=0.02)
        seen = trained(model, made, ctx, engine, range(4))
        tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": made}, tmp_path / "c")
        return seen + trained(model, made, ctx, engine, range(4, 6))

    def second(ctx: ParallelContext) -> list[float]:
        model = staged(ctx, layers, then)
        for p in model.parameters():
            nn.init.zeros_(p)
        made = AdamW(model.named_parameters(), lr=0.1)
        tpcore.checkpoint.load(tmp_path / "c", model, optimizer=made)
        return trained(model, made, ctx, "recomputed", range(4, 6))

    for got in run_ranks(Mesh({"pp": pp, "dp": 1, "tp": 2}), first):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)  # rounding, grown by AdamW
    for axes in ({"pp": 4 if layers == 4 else pp, "dp": 2, "tp": 1}, {"pp": 1, "dp": 2, "tp": 1}):
        for got in run_ranks(Mesh(axes), second):
            torch.testing.assert_close(got, want[8:], rtol=1e-9, atol=1e-9)


def test_balanced_stages_are_those_whose_largest_is_smallest() -> None:
    layers = [nn.Linear(n, 1, bias=False) for n in (9, 1, 1, 1, 6, 6)]
    assert ends_of(layers, "balanced", 3) == (1, 5, 6)
    assert ends_of(layers[:2], "balanced", 2) == (1, 2)
    assert [ends_of([nn.Linear(1, 1)] * n, "balanced", 4)[0] for n in (4, 5, 9)] == [1, 2, 3]


def test_a_slot_of_uneven_ends_is_in_files_and_spread_evenly_elsewhere() -> None:
    layout = Layout((2,), slot=Slot("pp", 3, 5, (1, 5)))
    assert Layout.from_json(layout.to_json()) == layout
    assert [layout.slot.coordinate(Mesh({"pp": n})) for n in (1, 2, 5) if layout.slot] == [0, 1, 3]
    assert Layout.from_json({"shape": [2], "cuts": [], "slot": ["pp", 3, 5]}) == Layout((2,), slot=Slot("pp", 3, 5))


@pytest.mark.parametrize(
    ("per_stage", "said"),
    [
        ((3, 3), r"layers_per_stage=\(3, 3\) does not divide 5 layers into pp=2 stages"),
        ((5,), r"give 2 numbers whose sum is 5"),
        ((5, 0), "of one layer or more"),
        ("largest", "'largest' does not divide 5 layers .* or 'balanced'"),
        (None, "5 layers do not divide into pp=2 stages.* layers_per_stage='balanced'"),
    ],
)
@each_rank(pp=2, dp=1, tp=1)
def test_numbers_that_do_not_fit_are_refused(ctx: ParallelContext, per_stage: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        staged(ctx, 5, per_stage)
