"""A training step over data parallel and its memory, with the optimizer's state whole and cut.

Contestants train the same stack of MLP blocks with AdamW, in float32, over gloo: DistributedDataParallel
with torch's AdamW; with torch's ZeroRedundancyOptimizer, which gives whole parameters to ranks; FSDP2
(``fully_shard`` of each block), which cuts the weights too; tpcore with AdamW and with ``Zero1``.

Each contestant has processes of its own, so that its peak of memory is its own, and contestants take turns:
one round starts each of them once, in an order that is drawn anew. Time is the median of the steps of a
job, of the slower rank; memory is how far a rank's resident memory grows, at its highest, from before the
model is made, the largest of the ranks. The first steps, which make the state, are not timed. After the
last step all contestants must hold the same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tpcore

from .harness import conditions, grown, resident, start

TOLERANCE = 1e-5
"""Of the sum of squares of the weights: gradients are summed in another order."""
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Stack:
    hidden: int
    ffn: int
    blocks: int
    tokens: int  # of one rank

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Mlp(self.hidden, self.ffn) for _ in range(self.blocks)))


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return x + y


SIZES = {
    "large": Stack(1024, 4096, 12, 128),  # 100.7 M parameters
    "small": Stack(512, 2048, 6, 64),
    "tiny": Stack(16, 32, 2, 4),  # for the tests
}

Step = Callable[[Tensor], None]


def _ddp(model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Step:
    ddp = DistributedDataParallel(model)
    return _of(ddp, optimizer(ddp), lambda adamw: adamw.step())


def _of(model: nn.Module, optimizer: torch.optim.Optimizer, finish: Callable[[torch.optim.Optimizer], object]) -> Step:
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        finish(optimizer)

    return step


def ddp_adamw(model: nn.Module) -> Step:
    return _ddp(model, lambda ddp: torch.optim.AdamW(ddp.parameters(), **OPTIONS))


def ddp_zero(model: nn.Module) -> Step:
    return _ddp(model, lambda ddp: ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **OPTIONS))


def fsdp2(model: nn.Module) -> Step:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _of(model, torch.optim.AdamW(model.parameters(), **OPTIONS), lambda adamw: adamw.step())


def tpcore_adamw(model: nn.Module) -> Step:
    return _of(model, torch.optim.AdamW(model.named_parameters(), **OPTIONS), tpcore.optimizer_step)


def tpcore_zero1(model: nn.Module) -> Step:
    zero1 = tpcore.Zero1(torch.optim.AdamW, model.named_parameters(), **OPTIONS)
    return _of(model, zero1, tpcore.optimizer_step)


CONTESTANTS: dict[str, Callable[[nn.Module], Step]] = {
    "DDP, AdamW": ddp_adamw,
    "DDP, ZeroRedundancyOptimizer": ddp_zero,
    "FSDP2, AdamW": fsdp2,
    "tpcore, AdamW": tpcore_adamw,
    "tpcore, Zero1": tpcore_zero1,
}


@contextmanager
def _joined() -> Iterator[None]:
    tpcore.init(backend="cpu_gloo")
    try:
        yield
    finally:
        tpcore.shutdown()


def job(rank: int, options: Namespace) -> None:
    """One contestant on one rank."""
    size: Stack = SIZES[options.size]
    with _joined():
        x = torch.randn(size.tokens, size.hidden, generator=torch.Generator().manual_seed(rank))
        before = resident()
        model = size.build()
        step = CONTESTANTS[options.contestant](model)
        seconds = []
        for i in range(options.warm + options.steps):
            dist.barrier()
            began = time.perf_counter()
            step(x)
            if i >= options.warm:
                seconds.append(time.perf_counter() - began)
        peak = grown(before)
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        squares = sum(float(w.detach().double().square().sum()) for w in weights)
    largest = torch.tensor([statistics.median(seconds), peak], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if rank == 0:
        result = {"seconds": float(largest[0]), "peak": float(largest[1]), "squares": squares}
        Path(options.result).write_text(json.dumps(result))


def race(options: Namespace, world: int) -> dict[str, dict[str, list[float]]]:
    """By contestant, what its job said in each round."""
    measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
        for _ in range(options.rounds):
            for name in draw.sample(list(CONTESTANTS), len(CONTESTANTS)):
                one = Namespace(**vars(options), contestant=name, result=f"{folder}/result.json")
                start(job, one, world)
                for key, value in json.loads(Path(one.result).read_text()).items():
                    measured[name][key].append(value)
    squares = {name: keys["squares"][0] for name, keys in measured.items()}
    want = squares["DDP, AdamW"]
    for name, got in squares.items():
        if abs(got - want) > TOLERANCE * want:
            raise ValueError(f"{name}: the weights' squares sum to {got}, not {want}")
    return measured


def show(options: Namespace, world: int) -> None:
    entries = sum(p.numel() for p in SIZES[options.size].build().parameters())
    measured = race(options, world)
    floor = measured["DDP, AdamW"]["seconds"]
    lines = [
        f"**dp {world}, {entries:,} parameters** ({options.rounds} rounds of {options.steps} steps; "
        f"in the end all {len(measured)} hold equal weights)",
        "",
        "| | step | ratio to DDP, AdamW | peak memory | bytes a parameter |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in CONTESTANTS:
        seconds, peak = measured[name]["seconds"], statistics.median(measured[name]["peak"])
        ratio = statistics.median(t / f for t, f in zip(seconds, floor, strict=True))
        lines.append(
            f"| {name} | {statistics.median(seconds) * 1e3:.4g} ms | {ratio:.3f} | {peak / 2**20:.4g} MiB | "
            f"{peak / entries:.1f} |"
        )
    sys.stdout.write("\n".join(lines) + "\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--dp", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="that are timed in one job")
    parser.add_argument("--warm", type=int, default=3)
    options = parser.parse_args()
    for world in options.dp:
        show(options, world)
    sys.stdout.write(f"{conditions(max(options.dp))}\n")


if __name__ == "__main__":
    main()
