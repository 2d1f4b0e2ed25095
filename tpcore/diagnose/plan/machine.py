"""What a machine can do: memory, matmul rates and links of its devices, each figure with its source."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Curve = tuple[tuple[float, float], ...]

ATTENTION_EFFICIENCY = 0.7
"""Part of a large matmul's rate that fused attention is assumed to reach, forward and backward: FlashAttention-2 has 50
to 73 % of an A100's peak (Dao 2023, arXiv:2307.08691), where matmuls have ``MATMUL_EFFICIENCY``."""


@dataclass(frozen=True)
class Link:
    """One device's view of its connection to others: ``latency``, seconds of one step of a collective, and
    ``bandwidth``, bytes a second that the device sends."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """``hosts`` alike, each with ``per_host`` devices. ``memory``: bytes a device. ``flops``: by dtype, pairs of
    the FLOPs of one matmul and the FLOP/s that it reaches, ascending. ``memory_bandwidth``: bytes a second.
    ``overhead``: seconds that an operator costs on its host. ``inside`` and ``between``: links of a device to
    others of its host and to other hosts. ``attention``: the part of a matmul's rate that fused attention reaches.
    ``operators``: by torch's name of an operator without FLOPs, pairs of bytes that it reads and writes and the bytes a
    second that it reaches; for others ``memory_bandwidth`` holds. ``source``: where each field's figure is from."""

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
    attention: float = ATTENTION_EFFICIENCY
    operators: Mapping[str, Curve] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in ("per_host", "hosts", "memory"):
            _whole(field, getattr(self, field))
        for field in ("memory_bandwidth", "overhead"):
            _number(field, getattr(self, field), zero=field == "overhead")
        for field in ("inside", "between"):
            link = getattr(self, field)
            _number(f"{field}.latency", link.latency, zero=True)
            _number(f"{field}.bandwidth", link.bandwidth)
        if not self.flops:
            raise ValueError("flops must name at least one dtype, not {}")
        _number("attention", self.attention)
        for field, curves in (("flops", self.flops), ("operators", self.operators)):
            for name, curve in curves.items():
                _ascending(f"{field}.{name}", curve)

    @property
    def devices(self) -> int:
        return self.per_host * self.hosts

    @property
    def compiled(self) -> bool:
        """Whether a step is one program, in which no operator waits for its host."""
        return self.overhead == 0

    def rate(self, dtype: str, flops: float) -> float:
        """FLOP/s of a matmul of ``flops`` FLOPs: between two points of the curve by the logarithm of FLOPs,
        outside of it the nearest point's. Raises ValueError for a dtype without a curve."""
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no matmul rate for {dtype!r}; it has {', '.join(sorted(self.flops))}")
        return _on(self.flops[dtype], flops)

    def moved(self, name: str, nbytes: float) -> float:
        """Bytes a second of an operator that reads and writes ``nbytes`` and has no FLOPs."""
        curve = self.operators.get(name)
        return self.memory_bandwidth if curve is None else _on(curve, nbytes)

    @classmethod
    def read(cls, path: str | Path) -> Machine:
        """The machine of a file that ``write`` made. Raises ValueError that names the file, the field and its
        value where the file is not one."""
        try:
            entry = json.loads(Path(path).read_text())
            return _from_json(entry)
        except (OSError, ValueError) as e:  # JSON's errors are ValueErrors
            raise ValueError(f"{path} describes no machine: {e}") from e

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def _on(curve: Curve, size: float) -> float:
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
    for field, kind in (("name", str), ("flops", dict), ("source", dict), ("operators", dict)):
        if not isinstance(entry.get(field, kind()), kind):
            raise ValueError(f"{field} must be {_KINDS[kind]}, not {entry[field]!r}")
    links = {field: _link(field, entry[field]) for field in ("inside", "between")}
    flops = {dtype: _curve(f"flops.{dtype}", points) for dtype, points in entry["flops"].items()}
    operators = {name: _curve(f"operators.{name}", points) for name, points in entry.get("operators", {}).items()}
    return Machine(**{**entry, **links, "flops": flops, "operators": operators})


_KINDS = {str: "a text", dict: "an object"}


def _link(field: str, entry: Any) -> Link:
    if not (isinstance(entry, dict) and set(entry) == {"latency", "bandwidth"}):
        raise ValueError(f"{field} must be an object of latency and bandwidth, not {entry!r}")
    return Link(**entry)


def _curve(field: str, points: Any) -> Curve:
    pairs = isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 for p in points)
    if not pairs:
        raise ValueError(f"{field} must be pairs of FLOPs and FLOP/s, not {points!r}")
    return tuple((flops, rate) for flops, rate in points)


def _number(field: str, value: Any, *, zero: bool = False) -> None:
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (right and (value > 0 or (zero and value == 0))):
        raise ValueError(f"{field} must be a number {'of at least' if zero else 'above'} 0, not {value!r}")


def _whole(field: str, value: Any) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        raise ValueError(f"{field} must be a whole number above 0, not {value!r}")


def _ascending(field: str, curve: Curve) -> None:
    for point in curve:
        for value in point:
            _number(field, value)
    if not curve or any(a[0] >= b[0] for a, b in pairwise(curve)):
        raise ValueError(f"{field} must be pairs with ascending FLOPs, at least one, not {curve!r}")
