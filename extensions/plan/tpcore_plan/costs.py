"""What a step of a model costs, by parts, and the bytes that are held."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import add

from tpcore_explain.step import Program

from .meter import AFTER, Meter, Operator, PartCosts


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of parameters, of their gradients and their optimizer's state, the elements, and how many tensors."""

    nbytes: float = 0.0
    gradient: float = 0.0
    optimizer: float = 0.0
    elements: float = 0.0
    tensors: float = 0.0

    def __add__(self, other: HeldBytes) -> HeldBytes:
        return HeldBytes(*map(add, vars(self).values(), vars(other).values()))

    def scaled(self, by: float) -> HeldBytes:
        return HeldBytes(*(by * a for a in vars(self).values()))


@dataclass(frozen=True)
class StepCosts:
    """A rank's step for one microbatch. ``parts``: by phase and region. ``held``: by region and whether the
    parameters are experts', which ep divides among data ranks. ``hidden``: bytes of what passes between layers."""

    parts: Mapping[tuple[str, str], PartCosts]
    held: Mapping[tuple[str, bool], HeldBytes]
    hidden: float

    def part(self, phase: str, region: str) -> PartCosts:
        return self.parts.get((phase, region), PartCosts())


def parts_of(program: Program, meter: Meter) -> dict[tuple[str, str], PartCosts]:
    """What the meter found, with the program's collectives."""
    last = AFTER
    for call in program.collectives:
        last = meter.region(call.phase, call.module) or last
        meter.parts.setdefault((call.phase, last), PartCosts()).calls.append((call, float(call.nbytes)))
    return meter.parts


def held_by(program: Program, meter: Meter) -> dict[tuple[str, bool], HeldBytes]:
    totals: dict[tuple[str, bool], HeldBytes] = {}
    for p in program.parameters:
        region = meter.region("parameters", p.name) or AFTER
        key = region, any(p.name.startswith(f"{name}.") for name in meter.shares)
        sizes = HeldBytes(p.nbytes, p.gradient, p.optimizer, float(math.prod(p.shape)), 1.0)
        totals[key] = totals.get(key, HeldBytes()) + sizes
    return totals


def on_line(one: StepCosts, two: StepCosts, batch: float) -> StepCosts:
    """The costs for ``batch`` examples, on the line through those of one and of two."""

    def at(a: float, b: float) -> float:
        return max(a + (b - a) * (batch - 1), 0.0)

    parts = {}
    for key, a in one.parts.items():
        b = two.parts.get(key, a)
        pairs = list(zip(a.operators, b.operators, strict=False))
        if [o.name for o in a.operators] != [o.name for o in b.operators]:  # loops over chunks of tokens
            single, double = by_name(a.operators), by_name(b.operators)
            pairs = [(single[name], double.get(name, single[name])) for name in single]
        operators = [
            Operator(x.name, at(x.flops, y.flops), at(x.nbytes, y.nbytes), at(x.times, y.times)) for x, y in pairs
        ]
        calls = [(call, at(n, m)) for (call, n), (_, m) in zip(a.calls, b.calls, strict=False)]
        delta = a.delta + (b.delta - a.delta) * (batch - 1)
        parts[key] = PartCosts(operators, calls, delta, at(a.excess, b.excess))
    return StepCosts(parts, one.held, at(one.hidden, two.hidden))


def compact(costs: StepCosts) -> StepCosts:
    """The costs with one operator for each name."""
    parts = {k: replace(part, operators=list(by_name(part.operators).values())) for k, part in costs.parts.items()}
    return replace(costs, parts=parts)


def by_name(operators: Iterable[Operator]) -> dict[str, Operator]:
    """One for each name, of the mean size."""
    groups: dict[str, list[Operator]] = {}
    for operator in operators:
        groups.setdefault(operator.name, []).append(operator)
    means = {}
    for name, group in groups.items():
        times = sum(o.times for o in group)
        flops, nbytes = (sum(getattr(o, f) * o.times for o in group) / times for f in ("flops", "nbytes"))
        means[name] = Operator(name, flops, nbytes, times)
    return means
