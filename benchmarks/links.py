"""Links of a machine's devices, fitted to all-reduces that are timed on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tpcore.comm.comm import Comm
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore_plan.machine import Link

REDUCED = tuple(2**k for k in range(10, 25, 2))  # bytes: 1 KiB to 16 MiB
_TURNS = 5
_FASTEST = 1e-15  # seconds a byte, where larger tensors took no longer
_WARM = 520  # calls: a group compares its first 512 with other ranks


@dataclass(frozen=True)
class AllReduce:
    """``seconds`` of one all-reduce of ``nbytes`` over ``ranks`` ranks."""

    ranks: int
    nbytes: int
    seconds: float

    @property
    def steps(self) -> int:
        """Of a ring."""
        return 2 * (self.ranks - 1)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a ring."""
        return self.steps / self.ranks * self.nbytes


def fit(calls: Sequence[AllReduce]) -> tuple[Link, float]:
    """The link whose ring fits the calls best, by least squares of relative errors, and the median of these."""
    terms = np.array([[c.steps / c.seconds, c.sent / c.seconds] for c in calls])
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(calls)), rcond=None)[0]
    if latency < 0:  # then without one; and without the other where larger tensors took no longer
        latency, per_byte = 0.0, _fit_one(terms[:, 1])
    elif per_byte < _FASTEST:
        latency, per_byte = _fit_one(terms[:, 0]), _FASTEST
    error = statistics.median(abs(terms @ [latency, per_byte] - 1).tolist())
    return Link(float(latency), float(1 / per_byte)), error


def _fit_one(terms: Any) -> float:
    """The factor that brings all terms nearest to 1."""
    return float(terms.sum() / (terms @ terms))


def fitted(calls: Sequence[AllReduce]) -> tuple[Link, str]:
    """The link, and how it was found: the fit over all groups, and the links over the groups of each size."""
    link, error = fit(calls)
    links = ((n, fit([c for c in calls if c.ranks == n])[0]) for n in sorted({c.ranks for c in calls}))
    groups = (f"of {n}: {x.latency * 1e6:.3g} us a step and {x.bandwidth / 1e6:.4g} MB/s" for n, x in links)
    span = f"all-reduces of {calls[0].nbytes:,} to {calls[-1].nbytes:,} bytes fitted, median error {error:.0%}"
    return link, f"{span}; groups {', '.join(groups)}"


def all_reduces(ctx: ParallelContext, seconds: float) -> list[AllReduce]:
    """Over groups of 2, 4, ... ranks at once, and over all ranks; ``seconds`` for each. Collective over the job."""
    world = ctx.world.size
    sizes = sorted({world, *(n for n in (2, 4, 8, 16, 32, 64) if n < world and world % n == 0)})
    return [call for n in sizes for call in _all_reduces(ctx, {"dp": world // n, "tp": n}, "tp", seconds)]


def between_hosts(ctx: ParallelContext, per_host: int, seconds: float) -> list[AllReduce]:
    """As ``all_reduces`` over groups of one rank of each host at once: ``fit`` of it is a machine's ``between``."""
    return _all_reduces(ctx, {"dp": ctx.world.size // per_host, "tp": per_host}, "dp", seconds)


def _all_reduces(ctx: ParallelContext, axes: Mapping[str, int], axis: str, seconds: float) -> list[AllReduce]:
    comm = ctx.backend.comm(Mesh(axes).group(axis), ctx.rank)
    scalar = torch.ones(1, device=ctx.device)
    for _ in range(_WARM):
        comm.all_reduce(scalar)
    tensors = ((n, torch.ones(n // 4, device=ctx.device)) for n in REDUCED)
    return [AllReduce(comm.size, n, seconds_of(partial(comm.all_reduce, x), seconds, ctx.world)) for n, x in tensors]


def seconds_of(run: Callable[[], Any], seconds: float, comm: Comm) -> float:
    """The time of a run, the slowest rank's: of turns the median, in a turn the mean, since where ranks share a core a
    short run is alone on it and waits between two. All ranks make as many runs, in ``seconds``."""
    scalar = torch.ones(1, device=comm.position.device)
    comm.all_reduce(scalar)  # all begin together
    times = int(seconds / max(_longest(_time_of(run, 2), comm), 1e-7))
    per_turn = min(max(times // _TURNS, 1), 2000 // _TURNS)
    comm.all_reduce(scalar)
    return statistics.median(_longest(_time_of(run, per_turn), comm) for _ in range(_TURNS))


def _time_of(run: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        y = run()
    (y[0] if isinstance(y, tuple) else y).flatten()[:1].cpu()  # an accelerator computes behind its host
    return (time.perf_counter() - start) / times


def _longest(seconds: float, comm: Comm) -> float:
    """The longest of all ranks."""
    return float(comm.all_reduce(torch.tensor([seconds], device=comm.position.device), "max"))
