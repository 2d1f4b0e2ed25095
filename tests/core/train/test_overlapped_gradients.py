"""Gradients that are reduced beside backward: the same bits as after it, and earlier."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.nets import cut_net, ids_of, loss_of, plain_net
from torch import Tensor, nn

import tpcore
from tpcore import overlap_grad_reduce
from tpcore.comm.comm import Comm
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore.train import data_parallel

DP2TP2 = Mesh({"dp": 2, "tp": 2})
Step = Callable[[ParallelContext, nn.Module, torch.optim.Optimizer, int, Any], None]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "BUCKET", 600)


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch": lambda net: torch.optim.AdamW(net.parameters(), lr=0.05),
    "zero": lambda net: tpcore.Zero1(torch.optim.AdamW, net.named_parameters(), lr=0.05, bucket_mb=5e-4),
    "zero, sums": lambda net: tpcore.Zero1(
        torch.optim.SGD, net.named_parameters(), lr=0.5, bucket_mb=5e-4, grad_dtype=torch.float64
    ),
}


def _ids(ctx: ParallelContext, seed: int) -> Tensor:
    return ids_of(seed, batch=8).chunk(ctx.mesh.axes["dp"])[ctx.coord("dp")]


def _backward(ctx: ParallelContext, net: nn.Module, seed: int) -> None:
    loss_of(net, _ids(ctx, seed)).backward()


def _once(ctx: ParallelContext, net: nn.Module, optimizer: torch.optim.Optimizer, i: int, block: Any) -> None:
    with block():
        _backward(ctx, net, i)
    tpcore.optimizer_step(optimizer, max_norm=0.1)


def _accumulated(ctx: ParallelContext, net: nn.Module, optimizer: torch.optim.Optimizer, i: int, block: Any) -> None:
    _backward(ctx, net, i)
    _backward(ctx, net, i + 10)
    with block():
        _backward(ctx, net, i + 20)
    tpcore.optimizer_step(optimizer)


def _all_in_it(ctx: ParallelContext, net: nn.Module, optimizer: torch.optim.Optimizer, i: int, block: Any) -> None:
    with block():
        for n in range(1 + i % 3):  # another number each time: learnt wrongly, and still right
            _backward(ctx, net, i + n)
    tpcore.optimizer_step(optimizer)


def _again_after_it(ctx: ParallelContext, net: nn.Module, optimizer: torch.optim.Optimizer, i: int, block: Any) -> None:
    with block():
        _backward(ctx, net, i)
    if ctx.coord("dp") == i % 2:  # on one rank alone
        _backward(ctx, net, i + 10)
    tpcore.optimizer_step(optimizer)


def _by_hand(ctx: ParallelContext, net: nn.Module, optimizer: torch.optim.Optimizer, i: int, block: Any) -> None:
    with block():
        _backward(ctx, net, i)
    if isinstance(optimizer, tpcore.Zero1):
        for p in net.parameters():
            if (grad := optimizer.gradient_of(p)) is not None:
                grad.mul_(0.5)
    else:
        net.norm.weight.grad = torch.ones_like(net.norm.weight)
        net.up.weight.grad = None
        nn.utils.clip_grad_norm_([net.norm.bias], 1e-3)
    tpcore.optimizer_step(optimizer)


def _dropped(ctx: ParallelContext, net: nn.Module, optimizer: torch.optim.Optimizer, i: int, block: Any) -> None:
    for seed in (i, i + 10):  # the first batch is thrown away, as after a bad loss
        optimizer.zero_grad()
        with block():
            _backward(ctx, net, seed)
    tpcore.optimizer_step(optimizer)


def _partly_used(ctx: ParallelContext, net: nn.Module, optimizer: torch.optim.Optimizer, i: int, block: Any) -> None:
    with block():
        _backward(ctx, net, i)
        if ctx.coord("dp") == 0 and i % 2:  # the last parameters of all, and so in the first bucket
            net.unused(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    tpcore.optimizer_step(optimizer)


def _scaled(ctx: ParallelContext, net: nn.Module, optimizer: torch.optim.Optimizer, i: int, block: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with block():
        scaler.scale(loss_of(net, _ids(ctx, i))).backward()
    if i == 1 and ctx.rank == 0:
        net.norm.weight.grad = torch.full_like(net.norm.weight, float("inf"))
    tpcore.optimizer_step(optimizer, scaler=scaler, max_norm=1.0)
    scaler.update()
    assert scaler.get_scale() == (2.0 if i == 1 else 4.0)


STEPS: dict[str, Step] = {f.__name__.strip("_"): f for f in (
    _once, _accumulated, _all_in_it, _again_after_it, _by_hand, _dropped, _partly_used, _scaled,
)}  # fmt: skip


def _train(
    ctx: ParallelContext, full: dict[str, Tensor], kind: str, step: Step, overlap: bool, without: str = ""
) -> list[Tensor]:
    net = cut_net(full)
    if without:
        delattr(net, without)
    optimizer = KINDS[kind](net)
    for i in range(4):
        optimizer.zero_grad()
        step(ctx, net, optimizer, i, (lambda: overlap_grad_reduce(optimizer)) if overlap else nullcontext)
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", STEPS)
def test_the_weights_are_those_of_a_reduction_after_backward(kind: str, how: str) -> None:
    full = plain_net().state_dict()
    want, got = (
        run_ranks(DP2TP2, lambda ctx, overlap=overlap: _train(ctx, full, kind, STEPS[how], overlap))
        for overlap in (False, True)
    )
    for ours, theirs in zip(got, want, strict=True):
        assert all(map(torch.equal, ours, theirs))


def _of_four(ctx: ParallelContext, full: dict[str, Tensor], kind: str, overlap: bool) -> list[Tensor]:
    assert "gloo" in repr(ctx.comm("dp").transport)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_parallel, "BUCKET", 600)
        return _train(ctx, full, kind, _once, overlap, without="unused")


@pytest.mark.slow
def test_four_processes_sum_in_the_same_order(pool: Any) -> None:
    """A ring sums an element in the order that its place in the bucket gives: buckets have to be the same ones."""
    full = plain_net().state_dict()
    mesh, env = Mesh({"dp": 4, "tp": 1}), {"TPCORE_SHM": "0"}
    want, got = (pool.run(mesh, _of_four, full, "torch", overlap, env=env) for overlap in (False, True))
    for ours, theirs in zip(got, want, strict=True):
        assert all(map(torch.equal, ours, theirs))


class Trace:
    """What happens on one rank, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: dict[int, list[str]] = {}
        for name in ("start_all_reduce", "start_reduce_scatter"):
            monkeypatch.setattr(Comm, name, self._noted(name, getattr(Comm, name)))

    def note(self, event: str) -> None:
        self.events.setdefault(tpcore.current().rank, []).append(event)

    def _noted(self, name: str, start: Any) -> Any:
        def noted(comm: Comm, *args: Any, **named: Any) -> Any:
            if "dp" in comm.group.axes:
                self.note(name)
            return start(comm, *args, **named)

        return noted


@pytest.mark.parametrize(("kind", "name"), [("torch", "start_all_reduce"), ("zero", "start_reduce_scatter")])
def test_buckets_start_before_backward_ends(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, full = Trace(monkeypatch), plain_net().state_dict()

    def rank(ctx: ParallelContext) -> None:
        net = cut_net(full)
        optimizer = KINDS[kind](net)
        for i in range(2):
            optimizer.zero_grad()
            with overlap_grad_reduce(optimizer):
                _backward(ctx, net, i)
                trace.note("backward is done")
            trace.note("step")
            tpcore.optimizer_step(optimizer)

    run_ranks(DP2TP2, rank)
    for events in trace.events.values():
        at = [i for i, event in enumerate(events) if event != name]
        assert [events[i] for i in at] == ["backward is done", "step"] * 2
        count = at[1] - at[0] - 1  # the first block learns
        assert count > 2
        assert at[0] == 0
        assert at[2] - at[1] - 1 == count  # all of them while backward runs, none in the step
        assert at[3] == at[2] + 1 == len(events) - 1


def _pipelined(ctx: ParallelContext, overlap: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = Deep().double()
    engine = tpcore.PipelineModel(net, 4)
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
    for i in range(3):
        optimizer.zero_grad()
        with overlap_grad_reduce(optimizer) if overlap else nullcontext():
            engine.run_train(_ids(ctx, i))
        tpcore.optimizer_step(optimizer, max_norm=0.5)
    return [p.detach().clone() for p in net.parameters()]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return (x @ self.embed.weight.t()).square().mean()


def test_a_bucket_waits_for_all_microbatches_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh({"pp": 2, "dp": 2, "tp": 1})
    want = run_ranks(mesh, lambda ctx: _pipelined(ctx, False))
    trace = Trace(monkeypatch)
    got = run_ranks(mesh, lambda ctx: _pipelined(ctx, True))
    for ours, theirs in zip(got, want, strict=True):
        assert all(map(torch.equal, ours, theirs))
    starts = {tuple(events) for events in trace.events.values()}
    assert len(starts) == 1
    # each bucket once a step: none was sent before its last microbatch, and again in the step
    assert len(next(iter(starts))) % 3 == 0
