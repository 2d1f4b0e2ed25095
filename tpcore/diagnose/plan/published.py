"""Machines by name: their published figures, each with its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from .machine import Curve, Link, Machine

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
