"""A pipeline is the plain model: loss, gradients, names, steps, checkpoints, at any number of stages."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import values
from helpers.pipelines import (
    ENGINES,
    WIDTH,
    Block,
    assert_same_gradients,
    backward,
    batch_of,
    cut,
    part_of,
    plain,
    share_of,
)
from helpers.tiers import tiers
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, checkpoint
from tpcore.comm.observer import Observer
from tpcore.layers.sharding import sharding
from tpcore.layout.layout import Slot
from tpcore.runtime.context import ParallelContext, use
from tpcore.testing import run_ranks
from tpcore.train.pipeline.model import Lockstep
from tpcore.train.pipeline.schedule import Schedule

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64 through a few layers


def mesh(pp: int, tp: int = 1, dp: int = 1) -> Mesh:
    return Mesh({"pp": pp, "dp": dp, "tp": tp})


def both_ways(ctx: ParallelContext, layers: int, count: int, tokens: bool) -> set[str]:
    """Loss and gradients of this rank by each engine, as those of the plain model; the names it holds."""
    size = 16 * ctx.mesh.axes["dp"]
    dense, batch = plain(layers, tied=True), batch_of(size)
    want = dense(**batch)
    want.backward()
    model = nn.Module()
    for engine in ENGINES:
        model = cut(layers, ctx, tied=True, tokens=tokens)
        loss = backward(model, engine, count, share_of(batch, ctx))
        mean = ctx.comm("dp").all_reduce(loss.reshape(1)) / ctx.comm("dp").size
        torch.testing.assert_close(mean[0], want.detach(), **EXACT)
        tpcore.reduce_gradients(model)
        assert_same_gradients(model, dense, ctx)
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("pp", "tp", "dp", "count", "tokens"),
    [
        (1, 1, 1, 4, False),
        (2, 1, 1, 1, False),
        (2, 1, 1, 16, False),
        (2, 2, 2, 4, False),
        (2, 4, 1, 2, True),
        (3, 1, 2, 8, False),
        (4, 2, 1, 8, True),
        (6, 1, 1, 2, False),
    ],
)
def test_a_pipeline_is_the_plain_model(pp: int, tp: int, dp: int, count: int, tokens: bool) -> None:
    layers = 12 if pp == 6 else 6 if pp == 3 else 4
    names = run_ranks(mesh(pp, tp, dp), lambda ctx: both_ways(ctx, layers, count, tokens))
    assert set().union(*names) == {name for name, _ in plain(layers, tied=True).named_parameters()}


# -- checkpoints ------------------------------------------------------------------------------------------
def staged(ctx: ParallelContext, tied: bool) -> nn.Module:
    model = cut(4, ctx, tied=tied)
    model.layers = tpcore.PipelinedLayers(model.layers, 2, shared=["mix"])
    return model


def whole_state(tied: bool) -> dict[str, Tensor]:
    """Biases too are not 0."""
    return {name: value + 1 for name, value in plain(4, tied=tied).state_dict().items()}


def assert_opens_on_any_mesh(path: Path, tied: bool) -> None:
    """With the values of ``whole_state``, and an epoch."""
    full = whole_state(tied)

    def read(ctx: ParallelContext) -> None:
        model = staged(ctx, tied)
        for p in model.parameters():
            nn.init.zeros_(p)
        assert checkpoint.load(path, model)["epoch"] == 3
        for name, value in model.state_dict().items():
            assert torch.equal(value, part_of(full[name], value, ctx)), name

    for pp, tp in ((1, 1), (2, 2), (4, 1), (2, 1), (1, 2)):
        run_ranks(mesh(pp, tp), read)


def test_a_checkpoint_opens_on_any_mesh(tmp_path: Path) -> None:
    """Plain modules' parameters too, and whole."""

    def write(ctx: ParallelContext) -> None:
        model = staged(ctx, True)
        for p in model.parameters():
            p.data += 1
        checkpoint.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "c")

    run_ranks(mesh(2, 2), write)
    full, whole = whole_state(True), values(tmp_path / "c")
    assert {*whole, "embed.weight", "head.weight"} == {*full}
    assert all(torch.equal(value, full[name]) for name, value in whole.items())
    assert_opens_on_any_mesh(tmp_path / "c", True)


def test_initial_values_are_those_of_one_stage() -> None:
    def parameters(ctx: ParallelContext) -> dict[str, Tensor]:
        torch.manual_seed(3)
        made = (tpcore.ColumnParallelLinear(WIDTH, WIDTH, gather_output=False) for _ in range(4))
        return dict(tpcore.PipelinedLayers(made, 2).named_parameters())

    (want,) = run_ranks(mesh(1), parameters)
    every = [part for stage in run_ranks(mesh(4), parameters) for part in stage.items()]
    assert dict(every).keys() == want.keys()
    assert len(every) == len(want)
    for name, p in every:
        assert torch.equal(p, want[name])


@each_rank(pp=2, dp=1, tp=1)
def test_what_is_on_one_stage_alone_says_so(ctx: ParallelContext) -> None:
    """After everything by which torch replaces parameters."""
    layers = tpcore.PipelinedLayers([Block() for _ in range(4)], 2)
    again = copy.deepcopy(layers)
    layers.load_state_dict({k: v.clone() for k, v in layers.state_dict().items()}, assign=True)
    meta = copy.deepcopy(layers).to("meta")
    for made in (layers, again, meta):
        for name, t in (*made.named_parameters(), *made.state_dict().items()):
            found = sharding(t)
            assert found is not None, name
            assert found.layout.slot == Slot("pp", int(name[0]), 4)
            assert found.axes == ("pp",)


# -- random numbers ---------------------------------------------------------------------------------------
@each_rank(pp=2, dp=1, tp=2)
def test_dropout_is_the_same_when_it_is_computed_again(ctx: ParallelContext) -> None:
    found = []
    for engine in ENGINES:
        model = cut(4, ctx, dropout=0.3)
        model.drop = nn.Identity()  # of the whole batch here, of a microbatch there
        torch.manual_seed(11)
        loss = backward(model, engine, 4, batch_of(8))
        found.append((loss, [p.grad for p in model.parameters()], torch.rand(3)))
    for loss, grads, after in found[1:]:
        torch.testing.assert_close(loss, found[0][0], **EXACT)
        torch.testing.assert_close(grads, found[0][1], **EXACT)
        assert torch.equal(after, found[0][2])


@each_rank(pp=2, dp=1, tp=1)
def test_dropout_before_the_layers_is_the_same_when_it_is_computed_again(ctx: ParallelContext) -> None:
    """The gradient is the slope of the loss with the same numbers drawn: central differences."""
    model = cut(2, ctx, dropout=0.4)
    pipe = tpcore.PipelineModel(model, 2)

    def loss(run: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(4)
        return run(**batch_of(4))

    loss(pipe.run_train)
    table, grad = model.embed.weight.data, model.embed.weight.grad
    slope = ctx.comm("pp").all_reduce(grad.square().sum().reshape(1))
    values = []
    for sign in (1, -1):
        table += sign * 1e-5 * grad
        values.append(loss(pipe.run_eval))
        table -= sign * 1e-5 * grad
    # 1e-7: what the third derivative leaves of a step of 1e-5
    torch.testing.assert_close((values[0] - values[1]) / 2e-5, slope[0], rtol=1e-6, atol=1e-8)


def test_each_microbatch_and_stage_draws_its_own() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            drawn.append(float(torch.rand(1)))
            return x + self.weight

    drawn: list[float] = []
    run_ranks(mesh(2), lambda ctx: tpcore.PipelinedLayers([Noise(), Noise()], 3)(torch.ones(6, 1)))
    # three microbatches on two stages; in the bubble each stage runs its first or last once more
    assert len(drawn) == 8
    assert len(set(drawn)) == 6


# -- memory, and the schedule -----------------------------------------------------------------------------
@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (3, 2), (3, 16), (5, 3)])
def test_the_schedule_runs_every_microbatch_once_on_each_stage(stages: int, count: int) -> None:
    schedule = Schedule(stages, count)
    forward, backward = schedule.forward_of, schedule.backward_of
    for r in range(stages):
        ran = [t - r for t in range(schedule.ticks) if 0 <= t - r < count]
        assert ran == [*range(count)]
        assert [forward(t)[r] for t in range(r, r + count)] == ran
        last = 2 * (stages - 1) - r
        assert [backward(t)[r] for t in range(last, last + count)] == ran
        assert last + count <= schedule.step_ticks
    assert [schedule.leaving(t) for t in range(stages - 1, schedule.ticks)] == [*range(count)]
    assert schedule.bubble == (stages - 1) / (count + stages - 1)


@pytest.mark.parametrize("count", [4, 16])
def test_lockstep_holds_few_inputs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    most: list[int] = []
    run = Lockstep.run

    def watched(self: Lockstep, end_tick: Callable[[], None]) -> Tensor:
        return run(self, lambda: most.append(len(self.inputs)))

    monkeypatch.setattr(Lockstep, "run", watched)
    run_ranks(mesh(2), lambda ctx: tpcore.PipelineModel(cut(4, ctx), count).run_train(**batch_of(16)))
    assert max(most) + 1 == Schedule(2, count).inputs_held == 3  # one of a tick is dropped at its end


def test_recomputation_keeps_the_inputs_alone() -> None:
    def kept(recompute: bool) -> int:
        def rank(ctx: ParallelContext) -> int:
            layers = tpcore.PipelinedLayers([Block() for _ in range(4)], 4, recompute=recompute)
            saved: dict[int, int] = {}

            def pack(t: Tensor) -> Tensor:
                saved[t.data_ptr()] = t.numel()
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = layers(torch.ones(8, 4, WIDTH, requires_grad=True), torch.eye(4))
            y.sum().backward()
            return sum(saved.values())

        return run_ranks(mesh(2), rank)[0]

    unit = 2 * 4 * WIDTH  # of one microbatch
    # beside the inputs of five ticks: conditions of one element, and the whole output once
    assert kept(True) <= (5 + 4 + 1) * unit
    assert kept(False) > 5 * 10 * unit


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dropped_pipeline_is_freed_at_once(engine: str) -> None:
    """Without the garbage collector: it runs on each rank at another time, and memory is needed at once."""

    def rank(ctx: ParallelContext) -> bool:
        model = cut(4, ctx)
        backward(model, engine, 4, batch_of(16))
        parts = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
        del model
        return all(part() is None for part in parts)

    gc.collect()
    gc.disable()
    try:
        assert run_ranks(mesh(2), rank) == [True, True]
    finally:
        gc.enable()


# -- arguments --------------------------------------------------------------------------------------------
class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor, extras: dict[str, Any]) -> tuple[Tensor, None]:
        bias, places = extras["bias"], extras["pair"][0]
        return torch.tanh(x * self.weight + bias + 0.1 * places), None


def biased(layers: Any, x: Tensor, bias: Tensor) -> Tensor:
    places = torch.arange(len(x), dtype=torch.float64).unsqueeze(1)
    for layer in layers:
        x = layer(x, extras={"bias": bias, "pair": (places, 3)})[0]
    return x.square().sum()


def test_arguments_that_take_a_gradient_nested_and_split() -> None:
    """And layers that return tuples."""
    x, bias = torch.randn(6, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

    def run(layers: Any) -> list[Tensor]:
        mine, theirs = x.clone().requires_grad_(), bias.clone().requires_grad_()
        biased(layers, mine, theirs).backward()
        return [mine.grad, theirs.grad]

    want = run([Biased() for _ in range(4)])
    for recompute in (True, False):
        for got in run_ranks(
            mesh(2), lambda ctx, r=recompute: run(tpcore.PipelinedLayers([Biased() for _ in range(4)], 3, recompute=r))
        ):
            torch.testing.assert_close(got, want, **EXACT)


@each_rank(pp=2, dp=1, tp=1)
def test_arguments_of_every_microbatch(ctx: ParallelContext) -> None:
    """A tensor whose first size happens to be that of the batch."""

    class Mixed(nn.Module):
        def forward(self, x: Tensor, mix: Tensor) -> Tensor:
            return mix @ x

    x, mix = torch.randn(4, 4, 2), torch.randn(4, 4)
    for other in (x, torch.randn(4, 2, 4), torch.randn(4, 2, 2, 4)):  # in whichever dim the size comes again
        with pytest.raises(ValueError, match=r"get mix of shape \(4, 4\).*shared=\['mix'\]"):
            tpcore.PipelinedLayers([Mixed(), Mixed()], 2)(other, mix)
    layers = tpcore.PipelinedLayers([Mixed(), Mixed()], 2, shared=["mix"])
    torch.testing.assert_close(layers(x, mix), mix @ (mix @ x))


@each_rank(pp=2, dp=1, tp=1)
def test_frozen_and_unused_parameters(ctx: ParallelContext) -> None:
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.spare = nn.Parameter(torch.ones(1))
            self.bias.requires_grad_(False)

    layers = tpcore.PipelinedLayers([Spare(), Spare()], 2)
    layers(torch.ones(4, 2)).sum().backward()
    for name, p in layers.named_parameters():
        assert (p.grad is not None) == name.endswith("weight")


@each_rank(pp=2, dp=1, tp=1)
def test_autocast_holds_when_it_is_computed_again(ctx: ParallelContext) -> None:
    grads = []
    for recompute in (True, False):
        torch.manual_seed(0)
        layers = tpcore.PipelinedLayers([nn.Linear(8, 8) for _ in range(2)], 2, recompute=recompute)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layers(torch.ones(4, 8).bfloat16())
        y.float().square().sum().backward()
        grads.append([p.grad for p in layers.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@each_rank(pp=2, dp=1, tp=1)
def test_losses_of_microbatches_are_averaged_or_added(ctx: ParallelContext) -> None:
    batch = {k: v for k, v in batch_of(4).items() if k != "scale"}
    for kind, factor in (("mean", 1), ("sum", 2)):
        dense = plain(2)
        want = dense(**batch)
        model = plain(2)
        got = tpcore.PipelineModel(model, 2, loss=kind).run_train(**batch)
        torch.testing.assert_close(got, factor * want.detach(), **EXACT)
        (factor * want).backward()
        assert_same_gradients(model, dense, ctx)
        tpcore.PipelineModel(model, 2, loss=kind).run_train(**batch)  # once more: gradients add up
        torch.testing.assert_close(model.norm.weight.grad, 2 * dense.norm.weight.grad, **EXACT)


@pytest.mark.parametrize("cut_state", tiers([True], [False]))
def test_a_scaled_step_is_the_unscaled_one(cut_state: bool) -> None:
    """Bit for bit, since scales are powers of two. An infinity on one stage skips the step of all stages."""

    def run(ctx: ParallelContext, scaled: bool) -> tuple[list[float], dict[str, Tensor], list[float]]:
        model = cut(4, ctx, tied=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3) if scaled else None
        pipe = tpcore.PipelineModel(model, 2, scaler=scaler)
        made = partial(tpcore.Zero1, torch.optim.AdamW) if cut_state else torch.optim.AdamW
        optimizer, losses, scales = made(model.named_parameters(), lr=0.02), list[float](), list[float]()
        for step in range(6):
            optimizer.zero_grad()
            losses += [pipe.run_train(**share_of(batch_of(8, step + i), ctx)).item() for i in range(2)]
            if step == 2 and ctx.rank == ctx.mesh.size - 1:
                next(model.layers.parameters()).grad.view(-1)[0] = float("inf")
            norm = tpcore.optimizer_step(optimizer, max_norm=0.5, skip_nonfinite=True, scaler=scaler)
            losses.append(norm.item())
            if scaler is not None:
                scaler.update()
                scales.append(scaler.get_scale() / 2**20)
        return losses, model.state_dict(), scales

    shape = mesh(2, 2, 2 if cut_state else 1)
    every = zip(run_ranks(shape, lambda c: run(c, False)), run_ranks(shape, lambda c: run(c, True)), strict=True)
    for (losses, state, _), (scaled_losses, scaled_state, scales) in every:
        assert scaled_losses == losses
        assert losses[2::3].index(float("inf")) == 2
        assert all(torch.equal(value, state[name]) for name, value in scaled_state.items())
        assert scales == [1, 1, 0.5, 0.5, 0.5, 1]


# -- stages that are given different batches -----------------------------------------------------------------
@pytest.mark.parametrize(("checked", "engine"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(("other", "at"), [("labels", 0), ("ids", 1), ("shape", 1), ("none", 0)])
def test_stages_of_different_batches_are_told(other: str, at: int, checked: bool, engine: bool) -> None:
    """As scripts do that give ids to the first stage and labels to the last."""

    def steps(ctx: ParallelContext) -> None:
        model = plain(2)
        pipe = tpcore.PipelineModel(model, 2) if engine else None
        if pipe is None:
            model.layers = tpcore.PipelinedLayers(model.layers, num_microbatches=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            ids = torch.arange(24).view(8, 3) % 23  # of 24 words
            labels = ids + 1
            if ctx.coord("pp") == at and step == (1 if checked else 0):
                ids = {"ids": torch.zeros_like(ids), "shape": ids[:4]}.get(other, ids)
                labels = {"labels": torch.zeros_like(ids), "shape": labels[:4]}.get(other, labels)
            if pipe is None:
                model(ids, labels).backward()
            else:
                pipe.run_train(ids, labels)
            tpcore.optimizer_step(optimizer)

    def check(ctx: ParallelContext) -> None:
        with use(replace(ctx, observer=Observer() if checked else None)) as inner:
            if other == "none":
                steps(inner)
                return
            with pytest.raises(ValueError, match=r"^stages 0 and 1 .* differ in .*: every stage gets the whole"):
                steps(inner)

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), check)
