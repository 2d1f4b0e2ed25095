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


def find(name: str, hosts: int = 1) -> Machine:
    """The published machine of this name, or the one of a machine's file, with ``hosts`` hosts. Raises
    ValueError for a name that is neither."""
    if name in PUBLISHED:
        return dataclasses.replace(PUBLISHED[name], hosts=hosts)
    if not Path(name).is_file():
        raise ValueError(
            f"no machine {name!r}: it is neither a file nor one of {', '.join(PUBLISHED)}; "
            "`tpcore plan --calibrate --out FILE` writes this machine's file"
        )
    return dataclasses.replace(Machine.read(name), hosts=hosts)


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


# -- published figures ----------------------------------------------------------------------------------
MATMUL_EFFICIENCY = 0.8
"""Part of the published peak that a large matmul is assumed to reach on a machine without calibration. A tuned
BF16 matmul of 4224 x 8192 x 2048 reached 780 of the 989 TFLOPS of an H100 (H. He, "H100 peak matmul FLOPS",
gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405)."""
LINK_EFFICIENCY = 0.8
"""Part of a link's published bandwidth that a large collective is assumed to reach: packet headers, and the
memory copies at both ends."""
_MATMULS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_GIB = 2**30


def _roofline(peak: float, bandwidth: float, itemsize: int) -> Curve:
    """The rates of square matmuls that compute at ``MATMUL_EFFICIENCY`` of ``peak`` and then move three matrices."""
    points = []
    for n in _MATMULS:
        flops = 2.0 * n**3
        seconds = flops / (MATMUL_EFFICIENCY * peak) + 3 * itemsize * n**2 / bandwidth
        points.append((flops, flops / seconds))
    return tuple(points)


def _published(
    name: str,
    per_host: int,
    memory: int,
    peaks: Mapping[str, float],
    memory_bandwidth: float,
    inside: Link,
    between: Link,
    *,
    overhead: float,
    source: Mapping[str, str],
) -> Machine:
    sizes = {"float64": 8, "float32": 4}
    flops = {dtype: _roofline(peak, memory_bandwidth, sizes.get(dtype, 2)) for dtype, peak in peaks.items()}
    reached = {
        field: f"{source[field]}; {share:.0%} of it assumed ({constant})"
        for field, share, constant in (
            ("flops", MATMUL_EFFICIENCY, "MATMUL_EFFICIENCY"),
            ("inside", LINK_EFFICIENCY, "LINK_EFFICIENCY"),
            ("between", LINK_EFFICIENCY, "LINK_EFFICIENCY"),
        )
    }
    near, far = (Link(link.latency, LINK_EFFICIENCY * link.bandwidth) for link in (inside, between))
    return Machine(name, per_host, 1, memory, flops, memory_bandwidth, overhead, near, far, {**source, **reached})


_NEURON_PEAKS = {"bfloat16": 95e12, "float16": 95e12, "float32": 23.75e12}  # of one of the two cores of a chip
_TRN1 = "AWS Neuron documentation, Trn1 architecture (awsdocs-neuron, trn1-arch)"
_INF2 = "AWS Neuron documentation, Inf2 architecture (awsdocs-neuron, inf2-arch)"
_COMPILED = "assumed: a step is one compiled program, no operator waits for its host"
_UNPUBLISHED = "its latency is not published: NCCL's for a network step is assumed"
_H100 = "NVIDIA H100 data sheet, SXM5"
_A100 = "NVIDIA A100 80 GB data sheet, SXM4"
_NCCL = "latency: NCCL, src/graph/tuning.cc, hwLat of a Simple ring step"
_LAUNCH = "assumed: torch takes some microseconds to launch an operator"
_NVLINK, _NETWORK = 3.4e-6, 14e-6  # seconds of a step, of hwLat

PUBLISHED: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _published(
            *("trn1.32xlarge", 32, 16 * _GIB, _NEURON_PEAKS, 410.0 * _GIB),
            *(Link(_NETWORK, 96.0 * _GIB), Link(_NETWORK, 100e9 / 32)),
            overhead=0.0,
            source={
                "per_host": f"{_TRN1}: 16 chips of 2 NeuronCores",
                "memory": f"{_TRN1}: 512 GiB in 32 cores",
                "flops": f"{_TRN1}: 3,040 TFLOPS of BF16 and 760 of FP32 in 32 cores",
                "memory_bandwidth": f"{_TRN1}: 820 GiB/s a chip of 2 cores",
                "overhead": _COMPILED,
                "inside": f"{_TRN1}: NeuronLink-v2, 384 GiB/s a chip, read as both directions together, so 96 GiB/s "
                f"that a core sends; {_UNPUBLISHED}",
                "between": f"{_TRN1}: EFA, 800 Gb/s an instance of 32 cores; {_UNPUBLISHED}",
            },
        ),
        _published(
            *("inf2.48xlarge", 24, 16 * _GIB, _NEURON_PEAKS, 410.0 * _GIB),
            *(Link(_NETWORK, 48.0 * _GIB), Link(_NETWORK, 12.5e9 / 24)),
            overhead=0.0,
            source={
                "per_host": f"{_INF2}: 12 chips of 2 NeuronCores",
                "memory": f"{_INF2}: 384 GiB in 24 cores",
                "flops": f"{_INF2}: 2,280 TFLOPS of BF16 and 570 of FP32 in 24 cores",
                "memory_bandwidth": f"{_INF2}: 9,840 GiB/s an instance of 24 cores",
                "overhead": _COMPILED,
                "inside": f"{_INF2}: NeuronLink-v2, 192 GiB/s a chip, read as both directions together, so 48 GiB/s "
                f"that a core sends; {_UNPUBLISHED}",
                "between": f"Amazon EC2 Inf2 instances: network of 100 Gb/s an instance of 24 cores; {_UNPUBLISHED}",
            },
        ),
        _published(
            *("h100x8", 8, 80_000_000_000, {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}, 3.35e12),
            *(Link(_NVLINK, 450e9), Link(_NETWORK, 50e9)),
            overhead=5e-6,
            source={
                "per_host": "NVIDIA DGX H100 data sheet: 8 GPUs",
                "memory": f"{_H100}: 80 GB; what a device shows beyond 10^9 bytes each is left to CUDA's context",
                "flops": f"{_H100}: 989.4 TFLOPS of dense BF16, 66.9 of FP32 without TF32",
                "memory_bandwidth": f"{_H100}: 3.35 TB/s",
                "overhead": _LAUNCH,
                "inside": f"{_H100}: NVLink, 900 GB/s in both directions together; {_NCCL}",
                "between": f"NVIDIA DGX H100 data sheet: 8 ports of 400 Gb/s for 8 GPUs; {_NCCL}",
            },
        ),
        _published(
            *("a100x8", 8, 80_000_000_000, {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}, 2.039e12),
            *(Link(_NVLINK, 300e9), Link(_NETWORK, 25e9)),
            overhead=5e-6,
            source={
                "per_host": "NVIDIA DGX A100 data sheet: 8 GPUs",
                "memory": f"{_A100}: 80 GB; what a device shows beyond 10^9 bytes each is left to CUDA's context",
                "flops": f"{_A100}: 312 TFLOPS of dense BF16, 19.5 of FP32 without TF32",
                "memory_bandwidth": f"{_A100}: 2,039 GB/s",
                "overhead": _LAUNCH,
                "inside": f"{_A100}: NVLink, 600 GB/s in both directions together; {_NCCL}",
                "between": f"NVIDIA DGX A100 data sheet: 8 ports of 200 Gb/s for 8 GPUs; {_NCCL}",
            },
        ),
        _published(
            *("cpu", 8, 4 * _GIB, {"float32": 224e9, "float64": 112e9, "bfloat16": 224e9}, 6.4e9),
            *(Link(20e-6, 6.4e9), Link(50e-6, 12.5e9 / 8 / 8)),
            overhead=5e-6,
            source=dict.fromkeys(
                ("per_host", "memory", "flops", "memory_bandwidth", "overhead", "inside", "between"),
                "not this machine: a core of Amazon EC2 c6i.4xlarge (8 cores of Ice Lake at 3.5 GHz with two AVX-512 "
                "units, 32 GiB, 8 channels of DDR4-3200 for 32 cores, 12.5 Gb/s), latencies and BF16's rate assumed; "
                "`tpcore plan --calibrate` measures this one",
            ),
        ),
    )
}
"""By name; a device is a NeuronCore, a GPU, or a CPU core."""
