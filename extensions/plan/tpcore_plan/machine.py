"""What a machine can do: memory, matmul rates and links of its devices, each figure with its source; published ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

Curve = tuple[tuple[float, float], ...]

MATMUL_EFFICIENCY = 0.8
"""Part of the published peak that a large matmul is assumed to reach on a machine that was not measured. A tuned
BF16 matmul of 4224 x 8192 x 2048 reached 780 of the 989 TFLOPS of an H100 (H. He, "H100 peak matmul FLOPS",
gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405)."""
LINK_EFFICIENCY = 0.8
"""Part of a link's published bandwidth that a large collective is assumed to reach."""
_MATMULS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_GIB = 2**30
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
    """``hosts`` alike, each with ``per_host`` devices. ``memory``: bytes a device. ``flops``: by dtype, pairs of a
    matmul's FLOPs and the FLOP/s that it reaches, ascending. ``memory_bandwidth``: bytes a second. ``overhead``:
    seconds of an operator on its host. ``inside``, ``between``: links of a device inside its host and to others.
    ``attention``: the part of a matmul's rate that it reaches. ``operators``: by torch's name, pairs of bytes read and
    written and the bytes a second reached, instead of ``memory_bandwidth``. ``source``: of each field's figure."""

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
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a whole number above 0, not {value!r}")
        check_number("memory_bandwidth", self.memory_bandwidth)
        check_number("overhead", self.overhead, zero=True)
        check_number("attention", self.attention)
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


# -- published figures ------------------------------------------------------------------------------------
def _roofline(peak: float, bandwidth: float, itemsize: int) -> Curve:
    """The rates of square matmuls that compute at ``MATMUL_EFFICIENCY`` of ``peak`` and then move three matrices."""
    points = []
    for n in _MATMULS:
        flops = 2.0 * n**3
        seconds = flops / (MATMUL_EFFICIENCY * peak) + 3 * itemsize * n**2 / bandwidth
        points.append((flops, flops / seconds))
    return tuple(points)


def _published(
    sizes: tuple[str, int, int],
    peaks: Mapping[str, float],
    memory_bandwidth: float,
    inside: Link,
    between: Link,
    overhead: float,
    sources: tuple[str, ...],
) -> Machine:
    """``sizes``: name, devices of a host, memory of one. ``sources``: of the fields of ``_FIELDS``."""
    itemsizes = {"float64": 8, "float32": 4}
    flops = {dtype: _roofline(peak, memory_bandwidth, itemsizes.get(dtype, 2)) for dtype, peak in peaks.items()}
    source = dict(zip(_FIELDS, sources, strict=True))
    source["flops"] += f"; {MATMUL_EFFICIENCY:.0%} of it assumed (MATMUL_EFFICIENCY)"
    for field in ("inside", "between"):
        source[field] += f"; {LINK_EFFICIENCY:.0%} of it assumed (LINK_EFFICIENCY)"
    near, far = (Link(link.latency, LINK_EFFICIENCY * link.bandwidth) for link in (inside, between))
    name, per_host, memory = sizes
    return Machine(name, per_host, 1, memory, flops, memory_bandwidth, overhead, near, far, source)


_FIELDS = ("per_host", "memory", "flops", "memory_bandwidth", "overhead", "inside", "between")
_NVLINK, _NETWORK = 3.4e-6, 14e-6  # seconds of a step: NCCL, hwLat


def _neuron(name: str, page: str, cores: int, link: float, network: float, bandwidth: str, wire: str) -> Machine:
    """``link``: GiB/s that a core sends. ``network``: Gb/s of an instance. ``bandwidth`` and ``wire``: what is
    published of the memory's bandwidth and of the network."""
    unpublished = "its latency is not published: NCCL's for a network step is assumed"
    peaks = {"bfloat16": 95e12, "float16": 95e12, "float32": 23.75e12}  # of one of the two cores of a chip
    sources = (
        f"{page}: {cores // 2} chips of 2 NeuronCores",
        f"{page}: {16 * cores} GiB in {cores} cores",
        f"{page}: {95 * cores:,} TFLOPS of BF16 and {23.75 * cores:g} of FP32 in {cores} cores",
        f"{page}: {bandwidth}",
        "assumed: a step is one compiled program, no operator waits for its host",
        f"{page}: NeuronLink-v2, {4 * link:g} GiB/s a chip, read as both directions together, so {link:g} GiB/s that a "
        f"core sends; {unpublished}",
        f"{wire} {network:g} Gb/s an instance of {cores} cores; {unpublished}",
    )
    links = Link(_NETWORK, link * _GIB), Link(_NETWORK, network * 1e9 / 8 / cores)
    return _published((name, cores, 16 * _GIB), peaks, 410.0 * _GIB, *links, 0.0, sources)


def _nvidia(name: str, page: str, half: float, single: float, bandwidth: float, link: float, port: float) -> Machine:
    """``half`` and ``single``: FLOP/s of dense BF16 and of FP32; the others: bytes a second."""
    host = f"NVIDIA DGX {page.split()[1]} data sheet"
    nccl = "latency: NCCL, src/graph/tuning.cc, hwLat of a Simple ring step"
    sources = (
        f"{host}: 8 GPUs",
        f"{page}: 80 GB; what a device shows beyond 10^9 bytes each is left to CUDA's context",
        f"{page}: {half / 1e12:g} TFLOPS of dense BF16, {single / 1e12:g} of FP32 without TF32",
        f"{page}: {bandwidth / 1e9:,g} GB/s",
        "assumed: torch takes some microseconds to launch an operator",
        f"{page}: NVLink, {2 * link / 1e9:g} GB/s in both directions together; {nccl}",
        f"{host}: 8 ports of {8 * port / 1e9:g} Gb/s for 8 GPUs; {nccl}",
    )
    peaks, links = {"bfloat16": half, "float16": half, "float32": single}, (Link(_NVLINK, link), Link(_NETWORK, port))
    return _published((name, 8, 80_000_000_000), peaks, bandwidth, *links, 5e-6, sources)


_TRN1 = "AWS Neuron documentation, Trn1 architecture (awsdocs-neuron, trn1-arch)"
_INF2 = "AWS Neuron documentation, Inf2 architecture (awsdocs-neuron, inf2-arch)"
_CPU = (
    "not this machine: a core of Amazon EC2 c6i.4xlarge (8 cores of Ice Lake at 3.5 GHz with two AVX-512 units, 32 GiB,"
    " 8 channels of DDR4-3200 for 32 cores, 12.5 Gb/s), latencies and BF16's rate assumed"
)
PUBLISHED: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _neuron("trn1.32xlarge", _TRN1, 32, 96.0, 800, "820 GiB/s a chip of 2 cores", f"{_TRN1}: EFA,"),
        _neuron(
            *("inf2.48xlarge", _INF2, 24, 48.0, 100, "9,840 GiB/s an instance of 24 cores"),
            "Amazon EC2 Inf2 instances: network of",
        ),
        _nvidia("h100x8", "NVIDIA H100 data sheet, SXM5", 989.4e12, 66.9e12, 3.35e12, 450e9, 50e9),
        _nvidia("a100x8", "NVIDIA A100 80 GB data sheet, SXM4", 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
        _published(
            *(("cpu", 8, 4 * _GIB), {"float32": 224e9, "float64": 112e9, "bfloat16": 224e9}, 6.4e9),
            Link(20e-6, 6.4e9),
            Link(50e-6, 12.5e9 / 8 / 8),
            5e-6,
            (_CPU,) * len(_FIELDS),
        ),
    )
}
"""By name; a device is a NeuronCore, a GPU, or a CPU core."""


def find(name: str) -> Machine:
    """The published machine of this name, or the one of a file. ValueError for a name that is neither."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    if not Path(name).is_file():
        raise ValueError(f"no machine {name!r}: it is neither a file nor one of {', '.join(PUBLISHED)}")
    return Machine.read(name)
