"""Measures this machine: matmul rates, memory bandwidth, an operator's overhead, links and memory of its devices, all
at once, as they work in a training step: cores share caches and memory channels.

    python -m benchmarks.calibrate machine.json

writes the file that ``tpcore plan --machine`` and ``python -m benchmarks.plan --machine`` take, in a minute."""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpcore.comm.comm import Comm
from tpcore.processes.launch import launch
from tpcore.runtime.init import choose_backend, init, shutdown
from tpcore_plan.machine import Curve, Machine
from tpcore_plan.meter import attention_flops, cost_of

from .harness import say
from .links import REDUCED, AllReduce, all_reduces, fitted, seconds_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_MATMULS = tuple(2**k for k in range(6, 15))  # 64 to 16,384 rows
_SLOWEST = 0.5  # seconds of a matmul after which no larger one is measured
_COPIED = 2**26  # bytes, beyond the caches
_OPERATORS = 300
_aten = torch.ops.aten
_WIDTH = 1024
_SIZES = (2**18, 2**21, 2**23, 2**25)  # bytes of a tensor: from one in a core's cache to one beyond all caches
_SAME_AS = {"softmax": "_softmax", "_safe_softmax": "_softmax", "sub": "add", "index_put": "index_select"}
"""Operators that are not run, and the one that they take the rate of."""


def calibrate(
    path: str | Path | None = None, *, devices: int | None = None, backend: str | None = None, seconds: float = 60.0
) -> Machine:
    """Measure this host over ``backend`` (default: as ``tpcore.init`` chooses) with ``devices`` ranks (default: its
    accelerators, or the cores of this process) in about ``seconds``, and write the machine's file to ``path``.

    Links are fitted to all-reduces over each group size that is a power of two: a ring takes 2 (n - 1) steps of
    ``latency`` and sends 2 (n - 1) / n of the bytes (Thakur et al. 2005). ``between``, on CPUs, is that of sockets of
    this host, faster than any network. Raises ValueError for fewer than two devices, and for a backend that compiles
    its programs, whose parts cannot be measured one by one.
    """
    name = choose_backend(backend)
    count = launch(_devices, 1, args=(name,))[0] if devices is None else devices
    if count < 2:
        raise ValueError(f"calibration needs 2 devices or more, to measure their links, and there is {count}")
    device, near, fields = launch(_measure, count, args=(name, seconds * 0.8, True))[0]
    far, caveat = near, "not measured between hosts: one host only"
    if device == "cpu":  # shared memory is for one host; between hosts there are sockets
        far = launch(_measure, count, args=(name, seconds * 0.2, False), env={"TPCORE_SHM": "0"})[0][1]
        caveat = "sockets of one host, without a network"
    method = f"measured {date.today()}, torch {torch.__version__}, {count} ranks over {name}"
    (inside, inside_text), (between, between_text) = fitted(near), fitted(far)
    source = dict.fromkeys(("per_host", "memory", "memory_bandwidth", "overhead", "attention"), method)
    source["flops"] = f"{method}: square matmuls, all ranks at once, less an operator's overhead"
    source |= {"inside": f"{method}: {inside_text}", "between": f"{method}: {between_text}; {caveat}"}
    host = platform.node() or "this machine"
    machine = Machine(name=host, per_host=count, hosts=1, inside=inside, between=between, source=source, **fields)
    if path is not None:
        machine.write(path)
    return machine


# -- in a rank ------------------------------------------------------------------------------------------
def _devices(backend: str) -> int:
    """Of this host, of the backend's kind."""
    try:
        device = init(backend=backend).device
        if device.type == "cpu":
            return len(os.sched_getaffinity(0))
        count: int = torch.get_device_module(device).device_count()
        return count
    finally:
        shutdown()


def _measure(backend: str, seconds: float, everything: bool) -> tuple[str, list[AllReduce], dict[str, Any]]:
    """The kind of device, all-reduces, and with ``everything`` fields of a ``Machine``. All ranks call it together."""
    ctx = init(backend=backend)
    try:
        if not ctx.world.eager:
            raise ValueError(f"{backend} compiles its programs, so a step's parts cannot be measured: name a machine")
        device = ctx.device
        share = seconds / (len(_DTYPES) * len(_MATMULS) + 2 * len(REDUCED) * math.log2(ctx.world.size + 1) + 80)
        calls = all_reduces(ctx, share)
        if not everything:
            return device.type, calls, {}
        overhead = _overhead(ctx.world, device)
        flops = {str(d).removeprefix("torch."): _rates(d, ctx.world, device, overhead, share) for d in _DTYPES}
        target, source = (torch.ones(_COPIED, dtype=torch.uint8, device=device) for _ in range(2))
        bandwidth = 2 * _COPIED / seconds_of(partial(target.copy_, source), share, ctx.world)
        count, run = _attention(device)
        fields: dict[str, Any] = {"flops": flops, "memory_bandwidth": bandwidth, "overhead": overhead}
        fields["attention"] = count / seconds_of(run, share, ctx.world) / max(rate for _, rate in flops["float32"])
        fields["operators"] = _bandwidths(ctx.world, device, overhead, share)
        fields["memory"] = _memory(device, ctx.world.size)
        return device.type, calls, fields
    finally:
        shutdown()


def _rates(dtype: torch.dtype, world: Comm, device: torch.device, overhead: float, seconds: float) -> Curve:
    points = []
    for n in _MATMULS:
        a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
        elapsed = seconds_of(partial(torch.mm, a, b), seconds, world)
        # an operator's overhead counts apart; what is left of a small one is at least a part of it
        points.append((2.0 * n**3, 2.0 * n**3 / max(elapsed - overhead, elapsed / 4)))
        if elapsed * 8 > _SLOWEST:
            break
    return tuple(points)


def _bandwidths(world: Comm, device: torch.device, overhead: float, seconds: float) -> dict[str, Curve]:
    """Bytes a second of operators without FLOPs, on float32 tensors, by size and torch's name."""
    samples: dict[str, list[tuple[float, float]]] = {}
    for size in _SIZES:
        x, y, z = (torch.rand(size // 4 // _WIDTH, _WIDTH, device=device) + 0.5 for _ in range(3))
        for packet, args in _calls(x, y, z):
            name, _, nbytes = cost_of(packet, args, {}, packet(*args))
            elapsed = seconds_of(partial(packet, *args), seconds, world)
            samples.setdefault(name, []).append((nbytes, nbytes / max(elapsed - overhead, elapsed / 4)))
    curves = {name: tuple(points) for name, points in samples.items()}
    return curves | {name: curves[other] for name, other in _SAME_AS.items()}


def _overhead(world: Comm, device: torch.device) -> float:
    """Seconds that the host takes for an operator that autograd records, on one element."""
    x = torch.ones(1, device=device, requires_grad=True)

    def chain() -> Tensor:
        y: Tensor = x
        for _ in range(_OPERATORS):
            y = y * x
        return y.detach()

    return seconds_of(chain, 0.2, world) / _OPERATORS


def _memory(device: torch.device, ranks: int) -> int:
    """Bytes of this device; of a CPU its share of what the host, or the control group, has."""
    if device.type != "cpu":
        total: int = torch.get_device_module(device).mem_get_info(device)[1]
        return total
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text) if text.isdigit() else total) // ranks


def _calls(x: Tensor, y: Tensor, z: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Operators without FLOPs as a training step has them. ``z``: to write to."""
    for op in (_aten.gelu, _aten.silu, _aten.tanh, _aten.exp, _aten.sqrt, _aten.rsqrt, _aten.neg, _aten.clone):
        yield op, (x,)
    for op in (_aten.mul, _aten.add, _aten.div, _aten.gelu_backward, _aten.silu_backward, _aten.tanh_backward):
        yield op, (x, y)
    for op in (_aten.mul_, _aten.div_, _aten.add_):
        yield op, (z, 1.0)
    hidden = x > 1
    yield _aten.copy_, (z, y)
    yield _aten.addcmul_, (z, x, y)
    yield _aten.addcdiv_, (z, x, y)
    yield _aten.lerp_, (z, x, 0.1)
    yield _aten.masked_fill_, (z, hidden, 1.0)
    yield _aten.bernoulli_, (torch.empty_like(z), 0.9)
    yield _aten.where, (hidden, x, y)
    yield _aten.cat, ([x, y],)
    yield _aten.pow, (x, 2)
    yield _aten.new_zeros, (x, list(x.shape))
    rows, scale = len(x), torch.ones(_WIDTH, device=x.device)
    ids = torch.randint(rows, (rows,), device=x.device)
    mean, rstd = x.mean(-1, keepdim=True), torch.ones(rows, 1, device=x.device)
    for op in (_aten.sum, _aten.mean, _aten.amax):
        yield op, (x, [-1])
    yield _aten.linalg_vector_norm, (x,)
    for op in (_aten._softmax, _aten._log_softmax):
        yield op, (x, -1, False)
    for op in (_aten._softmax_backward_data, _aten._log_softmax_backward_data):
        yield op, (x, y, -1, x.dtype)
    yield _aten.native_layer_norm, (x, [_WIDTH], scale, scale, 1e-5)
    yield _aten.native_layer_norm_backward, (y, x, [_WIDTH], mean, rstd, scale, scale, [True] * 3)
    yield _aten.embedding, (x, ids)
    yield _aten.embedding_dense_backward, (y, ids, rows, -1, False)
    yield _aten.index_select, (x, 0, ids)


def _attention(device: torch.device) -> tuple[float, Callable[[], Tensor]]:
    """FLOPs of a causal fused attention in float32, forward and backward, and a run of it."""
    q, k, v = (torch.rand(2, 8, 1024, 64, device=device, requires_grad=True) for _ in range(3))

    def run() -> Tensor:
        y: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), y.detach())[0]

    return 3.5 * attention_flops(q, k, v, causal=True), run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--devices", type=int, help="default: all of this host")
    options = parser.parse_args()
    machine = calibrate(options.out, devices=options.devices)
    for field, text in machine.source.items():
        say(f"{field}: {text}")


if __name__ == "__main__":
    main()
