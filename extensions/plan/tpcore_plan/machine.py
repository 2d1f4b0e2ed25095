"""What a machine can do, each figure with its source: memory, matmul rates and links, and how long operators take."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from tpcore.comm.transport import PRIMITIVES
from tpcore_explain.recording import Collective

from .choice import Choice
from .meter import ATTENTION, SCORES, Operator, PartCosts

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Link:
    """One device's view of its connection to others: ``latency``, seconds of one step of a collective, and
    ``bandwidth``, bytes a second that the device sends."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """``hosts`` alike, each with ``per_host`` devices. ``memory``: bytes a device. ``flops``: by dtype, pairs of a
    matmul's FLOPs and the FLOP/s that it reaches, ascending. ``memory_bandwidth``: bytes a second. ``overhead``:
    seconds of an operator on its host. ``inside``, ``between``: links of a device inside its host and to others.
    ``attention``: the part of a matmul's rate that it reaches. ``beside``: the part of a collective's time that is lost
    where it runs beside compute. ``fused``: the part of their bytes that compiled operators without FLOPs move.
    ``operators``: by torch's name, pairs of bytes read and written and the bytes a second reached, instead of
    ``memory_bandwidth``. ``source``: of each field's figure."""

    name: str
    per_host: int
    hosts: int
    memory: int
    flops: Mapping[str, Curve]
    memory_bandwidth: float
    overhead: float
    inside: Link
    between: Link
    source: Mapping[str, str]
    attention: float = 0.7
    beside: float = 0.7
    fused: float = 0.2
    operators: Mapping[str, Curve] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in ("per_host", "hosts", "memory"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a whole number above 0, not {value!r}")
        check_number("memory_bandwidth", self.memory_bandwidth)
        check_number("overhead", self.overhead, zero=True)
        for field in ("attention", "fused"):
            check_number(field, getattr(self, field))
        check_number("beside", self.beside, zero=True)
        for field, link in (("inside", self.inside), ("between", self.between)):
            check_number(f"{field}.latency", link.latency, zero=True)
            check_number(f"{field}.bandwidth", link.bandwidth)
        if not self.flops:
            raise ValueError("flops must name at least one dtype, not {}")
        for field, curves in (("flops", self.flops), ("operators", self.operators)):
            for name, curve in curves.items():
                for value in (value for point in curve for value in point):
                    check_number(f"{field}.{name}", value)
                if not curve or any(a[0] >= b[0] for a, b in pairwise(curve)):
                    raise ValueError(f"{field}.{name} must be pairs with ascending FLOPs, at least one, not {curve!r}")

    @property
    def devices(self) -> int:
        return self.per_host * self.hosts

    @property
    def compiled(self) -> bool:
        """Whether a step is one program, in which no operator waits for its host."""
        return self.overhead == 0

    def rate(self, dtype: str, flops: float) -> float:
        """FLOP/s of a matmul of ``flops`` FLOPs, between two points by the logarithm. ValueError for another dtype."""
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no matmul rate for {dtype!r}; it has {', '.join(sorted(self.flops))}")
        return _interpolate(self.flops[dtype], flops)

    def moved(self, name: str, nbytes: float) -> float:
        """Bytes a second of an operator that reads and writes ``nbytes`` and has no FLOPs."""
        curve = self.operators.get(name)
        return self.memory_bandwidth if curve is None else _interpolate(curve, nbytes)

    @classmethod
    def read(cls, path: str | Path) -> Machine:
        """The machine of a file that ``write`` made. ValueError names the file, the field and its value."""
        try:
            return _from_json(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as e:  # JSON's errors are ValueErrors
            raise ValueError(f"{path} describes no machine: {e}") from e

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def _interpolate(curve: Curve, size: float) -> float:
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, slow), (high, fast) in pairwise(curve):
        if size <= high:
            return slow + (fast - slow) * math.log(size / low) / math.log(high / low)
    return curve[-1][1]


# -- files ----------------------------------------------------------------------------------------------
def _from_json(entry: Any) -> Machine:
    names = {f.name: f for f in dataclasses.fields(Machine)}
    if not isinstance(entry, dict):
        raise ValueError(f"it holds {entry!r}, not an object of {', '.join(names)}")
    if unknown := sorted(set(entry) - set(names)):
        raise ValueError(f"unknown field {unknown[0]!r} with {entry[unknown[0]]!r}; fields are {', '.join(names)}")
    missing = [n for n, f in names.items() if n not in entry and f.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"field {missing[0]!r} is missing")
    entry = {"operators": {}, **entry}
    for field in ("name", "flops", "source", "operators"):
        kind, text = (str, "a text") if field == "name" else (dict, "an object")
        if not isinstance(entry[field], kind):
            raise ValueError(f"{field} must be {text}, not {entry[field]!r}")
    for field in ("inside", "between"):
        if not (isinstance(entry[field], dict) and set(entry[field]) == {"latency", "bandwidth"}):
            raise ValueError(f"{field} must be an object of latency and bandwidth, not {entry[field]!r}")
        entry[field] = Link(**entry[field])
    for field in ("flops", "operators"):
        for name, points in entry[field].items():
            if not (isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 for p in points)):
                raise ValueError(f"{field}.{name} must be pairs of FLOPs and FLOP/s, not {points!r}")
        entry[field] = {name: tuple(map(tuple, points)) for name, points in entry[field].items()}
    return Machine(**entry)


def check_number(field: str, value: Any, *, zero: bool = False) -> None:
    right = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (right and (value > 0 or (zero and value == 0))):
        raise ValueError(f"{field} must be a number {'of at least' if zero else 'above'} 0, not {value!r}")


class Clock:
    """The seconds of operators and collectives as a step of ``choice`` runs them."""

    def __init__(self, machine: Machine, choice: Choice, dtype: str) -> None:
        self.machine, self._choice, self._dtype = machine, choice, dtype
        self._itemsize = getattr(torch, dtype).itemsize
        execution = choice.execution
        self._scores = execution is not None and execution.scores
        self._moved = machine.fused if execution is not None and execution.fused else 1.0

    def of(self, part: PartCosts, stages: int = 1) -> dict[str, float]:
        """By "compute" and the axes of collectives. ``stages``: that share the work, as that of the vocabulary."""
        return {"compute": self.compute(part.operators, stages), **self.sent(part.calls, stages)}

    def sent(self, calls: Iterable[tuple[Collective, float]], stages: int = 1) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for call, nbytes in calls:
            axes = ("pp", *call.axes) if stages > 1 else call.axes
            key = f"{' x '.join(axes)} collectives"
            seconds[key] = seconds.get(key, 0.0) + self.collective(call.op, axes, nbytes, call.size * stages)
        return seconds

    def compute(self, operators: Iterable[Operator], stages: int = 1) -> float:
        return sum(o.times * self.operator(o.name, o.flops / stages, o.nbytes / stages) for o in operators)

    def operator(self, name: str, flops: float, nbytes: float) -> float:
        machine = self.machine
        if name == SCORES:  # of attention that is no fused kernel, and computes the hidden half too
            return nbytes / machine.memory_bandwidth if self._scores else 0.0
        if not flops:
            return machine.overhead + self._moved * nbytes / machine.moved(name, nbytes)
        # the square matmul that computes as much with a byte, where it is the smaller one
        alike = 2.0 * (1.5 * self._itemsize * flops / nbytes) ** 3 if nbytes else math.inf
        rate = machine.rate(self._dtype, min(flops, alike))
        if name == ATTENTION:
            rate *= 0.5 if self._scores else machine.attention
        return machine.overhead + max(flops / rate, nbytes / machine.memory_bandwidth)

    def collective(self, op: str, axes: tuple[str, ...], nbytes: float, size: int) -> float:
        """Of a ring, which leaves each host once; ``nbytes``: of a rank's input."""
        if size == 1:
            return 0.0
        machine, stride, together = self.machine, 1, 1
        for axis, n in reversed(list(self._choice.mesh.axes.items())):  # ranks of the group on one host
            if axis in axes:
                together *= min(n, max(machine.per_host // stride, 1))
            stride *= n
        near, far = machine.inside, machine.between
        latency, bandwidth = near.latency, near.bandwidth
        if together < size:  # they share what leads out of their host
            latency = (far.latency + (together - 1) * near.latency) / together
            bandwidth = min(together * far.bandwidth, near.bandwidth) if together > 1 else far.bandwidth
        name = op.partition(" ")[0]
        steps = {"all_reduce": 2 * (size - 1), "permute": 1, "broadcast": math.ceil(math.log2(size))}
        sent = PRIMITIVES[name].sent(int(nbytes), size)
        return steps.get(name, size - 1) * latency + sent / bandwidth

    def exposed(self, collectives: float, compute: float) -> float:
        """What of collectives beside compute lengthens a step: what it does not cover, and what they take from it."""
        return max(collectives - compute, 0.0) + self.machine.beside * min(collectives, compute)
