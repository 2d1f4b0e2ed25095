"""Machines of published figures, and what of these is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .machine import Curve, Link, Machine

_MATMULS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_GIB = 2**30


@dataclass(frozen=True)
class Reached:
    """Parts of published figures. ``matmul``: of the peak, by a large one. ``attention``: of a matmul's rate. ``link``
    and ``memory``: of their bandwidths. ``beside``: of a collective's time, lost where it runs beside compute.
    ``fused``: of their bytes, what compiled operators without FLOPs move. ``source``: where they are from.

    The defaults are assumed: a tuned matmul had 780 of an H100's 989 TFLOPS (H. He, "H100 peak matmul FLOPS",
    gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405), FlashAttention-2 50 to 73 % of an A100's (Dao 2023,
    arXiv:2307.08691). Those of ``FITTED`` are from public training runs, ``python -m benchmarks.plan --published``."""

    matmul: float = 0.8
    attention: float = Machine.attention
    link: float = 0.8
    memory: float = 1.0
    beside: float = Machine.beside
    fused: float = Machine.fused
    source: str = "assumed"


ASSUMED = Reached()
FITTED = {
    name: replace(ASSUMED, matmul=matmul, attention=attention, link=0.95, memory=0.95, source="fitted to public runs")
    for name, matmul, attention in (("a100x8", 0.84, 0.4), ("h100x8", 0.7, 0.3))
}


def _roofline(peak: float, bandwidth: float, itemsize: int) -> Curve:
    """The rates of square matmuls that compute at ``peak`` and then move three matrices."""
    points = []
    for n in _MATMULS:
        flops = 2.0 * n**3
        points.append((flops, flops / (flops / peak + 3 * itemsize * n**2 / bandwidth)))
    return tuple(points)


def _published(
    sizes: tuple[str, int, int],
    peaks: Mapping[str, float],
    memory_bandwidth: float,
    inside: Link,
    between: Link,
    overhead: float,
    sources: tuple[str, ...],
    reached: Reached = ASSUMED,
) -> Machine:
    """``sizes``: name, devices of a host, memory of one. ``sources``: of the fields of ``_FIELDS``."""
    itemsizes, memory_bandwidth = {"float64": 8, "float32": 4}, reached.memory * memory_bandwidth
    rates = {dtype: (reached.matmul * peak, itemsizes.get(dtype, 2)) for dtype, peak in peaks.items()}
    flops = {dtype: _roofline(rate, memory_bandwidth, itemsize) for dtype, (rate, itemsize) in rates.items()}
    source = dict(zip(_FIELDS, sources, strict=True))
    parts = {
        "flops": reached.matmul,
        "memory_bandwidth": reached.memory,
        **dict.fromkeys(("inside", "between"), reached.link),
    }
    for field, part in parts.items():
        if part < 1:
            source[field] += f"; {part:.0%} of it {reached.source}"
    near, far = (Link(link.latency, reached.link * link.bandwidth) for link in (inside, between))
    rest = reached.attention, reached.beside, reached.fused
    return Machine(*sizes[:2], 1, sizes[2], flops, memory_bandwidth, overhead, near, far, source, *rest)


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


def _nvidia(
    name: str, page: str, half: float, single: float, bandwidth: float, link: float, port: float, reached: Reached
) -> Machine:
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
    return _published((name, 8, 80_000_000_000), peaks, bandwidth, *links, 5e-6, sources, reached)


def gpus(name: str, reached: Reached | None = None, bandwidth: float | None = None) -> Machine:
    """``h100x8`` or ``a100x8``, where other parts of the figures are reached, or the memory has another bandwidth."""
    page, half, single, published, link, port = _GPUS[name]
    return _nvidia(name, page, half, single, bandwidth or published, link, port, reached or FITTED[name])


_GPUS = {
    "h100x8": ("NVIDIA H100 data sheet, SXM5", 989.4e12, 66.9e12, 3.35e12, 450e9, 50e9),
    "a100x8": ("NVIDIA A100 80 GB data sheet, SXM4", 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
}


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
        *map(gpus, _GPUS),
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
