"""Pipelines: the time of a step of layers that sleep, and the memory that a step of real ones allocates.

Sleeping layers need no core, so that as many stages as there are run at once on any machine, and a step takes
what its schedule says: every tick the time of the slowest stage, the bubble included. Theory, with ``M``
microbatches, ``S`` stages and ``f`` and ``b`` seconds of a stage's forward and backward:

    (M + S - 1) (f + b)         forward once
    (M + S - 1) (f + b + f)     forward again in backward: recomputation

torch's ``Schedule1F1B`` runs the same stages, with ``torch.utils.checkpoint`` where they recompute.

Memory is counted and not sampled: torch's profiler notes the size of every allocation of a rank, and when it
is freed. Shown is the peak of a step above what was there before it, in inputs of one microbatch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed import pipelining

import tpcore
from tpcore.train.pipeline import Schedule

from .harness import conditions

FORWARD, BACKWARD = 0.03, 0.06
WIDTH, TOKENS, LAYERS = 64, 64, 8


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD)
        ctx.save_for_backward(x)  # what makes torch's checkpoint compute it again
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _ = ctx.saved_tensors
        time.sleep(BACKWARD)
        return grad, grad.new_zeros(1)


class Sleeper(nn.Module):
    """A whole stage's layers as one."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.weight, self.again = nn.Parameter(torch.ones(1)), again

    def forward(self, x: Tensor) -> Tensor:
        nap: Callable[[Tensor, Tensor], Tensor] = _Nap.apply
        if not self.again:
            return nap(x, self.weight)
        y: Tensor = torch.utils.checkpoint.checkpoint(nap, x, self.weight, use_reentrant=False)
        return y


class Tower(nn.Module):
    layers: nn.Module

    def __init__(self, layers: Iterable[nn.Module], width: int) -> None:
        super().__init__()
        self.enter, self.layers = nn.Linear(width, width), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in cast(Iterable[nn.Module], self.layers):
            x = layer(x)
        return x.square().mean()


def _steps(ctx: tpcore.ParallelContext, count: int) -> dict[str, Callable[[], object]]:
    """A step of each contestant, on this rank."""
    pp, x = ctx.comm("pp"), torch.rand(count, 4)

    def tower(*, recompute: bool) -> Tower:
        model = Tower([], 4)
        stages = (Sleeper() for _ in range(pp.size))
        model.layers = tpcore.PipelinedLayers(stages, count, recompute=recompute)
        return model

    kept, again = tower(recompute=False), tower(recompute=True)
    lockstep = tpcore.PipelineModel(Tower([Sleeper() for _ in range(pp.size)], 4), count)
    return {
        "PipelinedLayers, no recomputation": lambda: kept(x).backward(),
        "torch Schedule1F1B": _torch(ctx, count, x, again=False),
        "PipelinedLayers": lambda: again(x).backward(),
        "PipelineModel": lambda: lockstep.run_train(x),
        "torch Schedule1F1B, recomputing": _torch(ctx, count, x, again=True),
    }


def _torch(ctx: tpcore.ParallelContext, count: int, x: Tensor, *, again: bool) -> Callable[[], object]:
    pp, place = ctx.comm("pp"), ctx.coord("pp")
    stage = pipelining.PipelineStage(Sleeper(again=again), place, pp.size, torch.device("cpu"), group=pp.process_group)
    schedule = pipelining.Schedule1F1B(stage, count, loss_fn=lambda y, target: y.square().mean())
    first, last = place == 0, place == pp.size - 1
    loss_arguments: dict[str, Any] = {"target": x} if last else {}
    return lambda: schedule.step(*((x,) if first else ()), **loss_arguments)


def _race(pp: int, count: int, rounds: int) -> dict[str, float]:
    """The best of ``rounds`` steps of each, in seconds; the slowest rank counts."""
    torch.set_num_threads(1)
    ctx = tpcore.init(backend="cpu_gloo", pp=pp)
    torch.manual_seed(0)  # every stage gets the same batch
    best: dict[str, float] = {}
    for name, step in _steps(ctx, count).items():
        step()
        for _ in range(rounds):
            ctx.world.all_reduce(torch.zeros(1))
            start = time.perf_counter()
            step()
            took = ctx.world.all_reduce(torch.tensor([time.perf_counter() - start]), "max")
            best[name] = min(best.get(name, 1e9), took.item())
    tpcore.shutdown()
    return best


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def _memory(pp: int, counts: tuple[int, ...]) -> dict[str, list[float]]:
    """By contestant and number of microbatches: the peak of rank 0, in inputs of one microbatch."""
    torch.set_num_threads(1)
    tpcore.init(backend="cpu_gloo", pp=pp)
    torch.manual_seed(0)
    peaks: dict[str, list[float]] = {}
    for count in counts:
        for name, step in _real_steps(count).items():
            step()  # gradients are there from now on
            peaks.setdefault(name, []).append(_peak(step) / (TOKENS * WIDTH * 4))
    tpcore.shutdown()
    return peaks


def _real_steps(count: int) -> dict[str, Callable[[], object]]:
    x = torch.rand(count, TOKENS, WIDTH)

    def tower(*, recompute: bool) -> Tower:
        model = Tower([], WIDTH)
        blocks = (Block() for _ in range(LAYERS))
        model.layers = tpcore.PipelinedLayers(blocks, count, recompute=recompute, shared=())
        return model

    kept, again, engine = tower(recompute=False), tower(recompute=True), tower(recompute=True)
    return {
        "PipelinedLayers, no recomputation": lambda: kept(x).backward(),
        "PipelinedLayers": lambda: again(x).backward(),
        "PipelineModel": lambda: tpcore.PipelineModel(engine, count).run_train(x),
    }


def _peak(step: Callable[[], object]) -> int:
    """Bytes allocated and not yet freed, at the most, while ``step`` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def _all(pp: int, counts: tuple[int, ...], rounds: int) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """The races of the first two counts, and the memory of each, in one job."""
    return [_race(pp, count, rounds) for count in counts[:2]], _memory(pp, counts)


def _times(pp: int, count: int, best: dict[str, float], rounds: int) -> None:
    ticks = Schedule(pp, count).ticks
    print(f"\n**pp={pp}, {count} microbatches** (bubble {Schedule(pp, count).bubble:.0%}, best of {rounds})\n")
    print("| | step | of theory | of torch's |\n|---|---:|---:|---:|")
    for name, seconds in best.items():
        again = name in ("PipelinedLayers", "PipelineModel") or "recomputing" in name
        theory = ticks * (FORWARD + BACKWARD + FORWARD * again)
        peer = best["torch Schedule1F1B, recomputing" if again else "torch Schedule1F1B"]
        print(f"| {name} | {seconds * 1e3:.0f} ms | {seconds / theory:.3f} | {seconds / peer:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("TPCORE_CHECK", "0")
    print(conditions())
    counts = tuple(options.microbatches)
    memory: dict[int, dict[str, list[float]]] = {}
    for pp in options.pp:
        races, memory[pp] = tpcore.launch(_all, nprocs=pp, args=(pp, counts, options.rounds))[0]
        for count, best in zip(counts, races, strict=False):
            _times(pp, count, best, options.rounds)
    for pp, peaks in memory.items():
        print(f"\n**Peak of a step on stage 0, pp={pp}** (in inputs of one microbatch)\n")
        print("| microbatches | " + " | ".join(map(str, counts)) + " |")
        print("|---|" + "---:|" * len(counts))
        for name, row in peaks.items():
            print(f"| {name} | " + " | ".join(f"{value:.0f}" for value in row) + " |")


if __name__ == "__main__":
    main()
