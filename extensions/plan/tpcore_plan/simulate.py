"""How much of its time a large job spends on progress: independent exponential failures and checkpoints, simulated, and
stragglers. Nothing here was measured on such a job."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .machine import check_number

_FACTORS = tuple(float(f) for f in np.geomspace(0.25, 4.0, 17))  # of Daly's interval


@dataclass(frozen=True)
class JobModel:
    """``devices``, each of which fails once in ``mtbf`` seconds of the mean; the work since a checkpoint is lost.
    ``save``: seconds that a checkpoint stops the job. ``restart``: seconds from a failure to the next step.
    ``jitter``: standard deviation of the logarithm of a device's time for a step, lognormal."""

    devices: int
    mtbf: float
    save: float
    restart: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"a job needs 1 device or more, not {self.devices}")
        for field in ("mtbf", "save", "restart", "jitter"):
            check_number(field, getattr(self, field), zero=field in ("restart", "jitter"))

    @property
    def mean(self) -> float:
        """Seconds of the mean between failures of the job: of any of its devices."""
        return self.mtbf / self.devices


@dataclass(frozen=True)
class Goodput:
    """The part of the time that is progress, without stragglers; ``error``: its standard error."""

    interval: float
    simulated: float
    error: float
    formula: float


@dataclass(frozen=True)
class Forecast:
    """``young`` and ``daly``: the best intervals between checkpoints by their formulas; ``best``: by simulation,
    all in seconds. ``straggling``: the mean of a step's time over one device's median. ``goodput``: at Daly's interval,
    with stragglers."""

    job: JobModel
    young: float
    daly: float
    best: float
    straggling: float
    goodput: float
    curve: tuple[Goodput, ...]

    def to_json(self) -> dict[str, Any]:
        return {"simulation": True, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """For people."""
        point = min(self.curve, key=lambda g: abs(g.interval - self.daly))
        return [
            f"Simulation, not a measurement: {self.job.devices:,} devices, a failure every {_span(self.job.mean)}",
            f"  a checkpoint every {_span(self.daly)} (Daly), {_span(self.young)} (Young), "
            f"{_span(self.best)} (simulated)",
            f"  progress without stragglers {point.simulated:.1%} of the time (simulated, standard error "
            f"{point.error:.1%}), {point.formula:.1%} (Daly)",
            f"  a step waits for the slowest device: {self.straggling:.2f} times the median one's time",
            f"  goodput {self.goodput:.1%}",
        ]


def young(job: JobModel) -> float:
    """The best interval to first order, J. W. Young, Communications of the ACM 17(9), 1974."""
    return math.sqrt(2 * job.save * job.mean)


def daly(job: JobModel) -> float:
    """The best interval to higher order, J. T. Daly, Future Generation Computer Systems 22(3), 2006, eq. 37."""
    ratio = job.save / (2 * job.mean)
    if ratio >= 1:
        return job.mean
    return young(job) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - job.save


def goodput_formula(job: JobModel, interval: float) -> float:
    """The expected part of the time that is progress (Daly 2006, eq. 20): failures may strike at any time."""
    m = job.mean
    exponent = (interval + job.save + job.restart) / m
    if exponent > 700:  # beyond float64; no job gets there
        return 0.0
    return interval / (m * math.exp(job.restart / m) * math.expm1((interval + job.save) / m))


def goodput(job: JobModel, interval: float, *, runs: int = 400, segments: int = 200, seed: int = 0) -> Goodput:
    """Simulate ``runs`` jobs, each of ``segments`` intervals with a checkpoint after each, failure by failure; 0 where
    one is not done after 100 failures a segment."""
    rng = np.random.default_rng(seed)
    length = interval + job.save
    seconds, remaining = np.zeros(runs), np.full(runs, segments)
    delay = np.zeros(runs)  # the first start is no restart
    for _ in range(100 * segments):
        gap = rng.exponential(job.mean, runs)
        needed = delay + remaining * length
        ends = (gap >= needed) & (remaining > 0)
        done = np.minimum(np.maximum(gap - delay, 0) // length, remaining).astype(int)
        seconds += np.where(remaining > 0, np.minimum(gap, needed), 0)
        remaining = np.where(ends, 0, remaining - done)
        delay[:] = job.restart
        if not remaining.any():
            break
    else:
        return Goodput(interval, 0.0, 0.0, goodput_formula(job, interval))
    mean = float(seconds.mean())
    progress = segments * interval / mean
    error = progress * float(seconds.std(ddof=1)) / math.sqrt(runs) / mean
    return Goodput(interval, progress, error, goodput_formula(job, interval))


def straggling(job: JobModel) -> float:
    """The mean of the slowest of all devices' times, each lognormal with median 1: by numerical integration over the
    maximum of normal variables."""
    z = torch.linspace(-9, 12, 40_001, dtype=torch.float64)
    below = job.devices * torch.special.log_ndtr(z)  # the logarithm of the maximum's distribution function
    weights = torch.exp(below).diff()
    return float((torch.exp(job.jitter * (z[1:] + z[:-1]) / 2) * weights).sum())


def forecast(job: JobModel, *, runs: int = 400, seed: int = 0) -> Forecast:
    """Simulate the job at intervals around Daly's, with the same failures for each. The best is the vertex of the
    parabola through the best three, over the logarithm of the interval."""
    start = daly(job)
    curve = tuple(goodput(job, f * start, runs=runs, seed=seed) for f in _FACTORS)
    peak = min(max(int(np.argmax([g.simulated for g in curve])), 1), len(curve) - 2)
    x = np.log([g.interval for g in curve[peak - 1 : peak + 2]])
    bend, slope, _ = np.polyfit(x, [g.simulated for g in curve[peak - 1 : peak + 2]], 2)
    best = float(np.exp(np.clip(-slope / (2 * bend), x[0], x[-1]))) if bend < 0 else curve[peak].interval
    slowdown = straggling(job)
    progress = curve[_FACTORS.index(1.0)].simulated / slowdown
    return Forecast(job, young(job), start, best, slowdown, progress, curve)


def _span(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
