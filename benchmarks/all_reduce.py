"""All-reduce by size: tpcore over shared memory and over gloo.

The floor is what shared memory cannot do without, and no meeting: the tensor is copied into a buffer, and
the sum of it and of a buffer is written to new memory. Each contestant's sum is compared before it is timed.
The calls over gloo are past the first ones, which wait for the comparison of all ranks; what comparing costs
from then on is the difference to the contestant whose calls are not compared. DeepSpeed's operator, where
deepspeed can be imported, adds in place; it is compiled at its first start.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpcore
from tpcore.settings import changed

from .harness import TP, Contestant, check_equal, conditions, race, say, start, table
from .peers import deepspeed_operator, importable

WARMUP = 520  # calls: the first 512 are compared before they run


def run(rank: int, options: argparse.Namespace) -> None:
    n = options.ranks
    ctx = tpcore.init(backend="cpu_gloo", tp=n)
    shared = ctx.comm("tp")
    with changed({"TPCORE_SHM": "0"}):
        gloo, silent = (ctx.comm_for(dist.new_group(list(range(n)))) for _ in range(2))
    unwatched: Any = silent.transport
    unwatched._watch.words = None  # what TPCORE_CHECK=0 makes of all groups of a job
    for _ in range(WARMUP):
        gloo.all_reduce(torch.ones(1))
    say(f"{conditions(n)}\n\ntpcore over {shared.transport!r} and over {gloo.transport!r}")
    operator = dict(importable({"DeepSpeed": lambda: ("DeepSpeed's operator", deepspeed_operator(rank))}))
    in_place: dict[str, Callable[[Tensor], Tensor]] = {
        "tpcore, shared memory, donated": partial(shared.all_reduce, donate=True),
        **operator,
    }
    for kb in options.kb:
        x = torch.full((kb << 8,), float(rank + 1))
        buffer = torch.empty_like(x)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "tpcore, shared memory": shared.all_reduce,
            "tpcore, gloo": gloo.all_reduce,
            "tpcore, gloo, not compared": silent.all_reduce,
            "gloo by hand": _by_hand,
        }
        for name, way in (ways | in_place).items():
            check_equal(name, "sum", way(x.clone()), torch.full_like(x, n * (n + 1) / 2), 0.0)
        contestants = [Contestant("floor", partial(_copied_and_summed, x, buffer))]
        contestants += [Contestant(name, partial(way, x)) for name, way in ways.items()]
        contestants += [Contestant(name, partial(way, torch.zeros_like(x))) for name, way in in_place.items()]
        inner = max(10, 2000 // (kb + 20))
        title = f"all_reduce of {kb} KB"
        result = race(title, contestants, options.rounds, inner, options.warm)
        say("\n" + table(result, "floor", "gloo by hand", *operator))
    tpcore.shutdown()


def _copied_and_summed(x: Tensor, buffer: Tensor) -> Tensor:
    return torch.add(x, buffer.copy_(x))


def _by_hand(x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kb", nargs="+", type=int, default=[1, 64, 1024, 4096], help="sizes of the tensor")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warm", type=int, default=10, help="runs before the first round")
    parser.add_argument("--ranks", type=int, default=TP, help="above the number of cores they share these")
    options = parser.parse_args()
    start(run, options, options.ranks)


if __name__ == "__main__":
    main()
