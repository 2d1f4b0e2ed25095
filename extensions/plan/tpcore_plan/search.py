"""Searches the meshes of a number of devices, and what is chosen with each, for the fastest step that fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tpcore.errors import counted
from tpcore_explain.summary import size
from tpcore_explain.target import Factory

from .choice import Choice
from .execution import Execution
from .machine import Machine
from .predict import Prediction, predict
from .published import find
from .reduced import Reduced, Ways

_MICROBATCHES = (1, 2, 4, 8, 16)
_BUCKETS = (4, 16, 64, 256)  # MiB
_TOKENS = 4096  # of an example that a rank has at least
_TOO_LARGE = "more memory than a device has for it"
_RESERVED = 0.06
"""Part of a device's memory that is left to what the allocator cannot use, the libraries and their buffers."""


@dataclass(frozen=True)
class Limits:
    """What a plan is for. ``memory``: bytes of a device."""

    devices: int
    memory: float
    batch: int
    seq_len: int
    dtype: torch.dtype
    capacity_factor: float | None = None


@dataclass(frozen=True)
class MeshPlan:
    """``rows``: predictions of what fits, the fastest first. ``refused``: why others do not fit, with how many of them
    there are."""

    machine: Machine
    limits: Limits
    model: str
    rows: tuple[Prediction, ...]
    refused: Mapping[str, int]
    cache: float | None = None
    """Bytes of a token's keys and values on a device, when the best plan's tp serves the model."""

    @property
    def best(self) -> Prediction:
        """Raises ValueError where nothing fits."""
        if not self.rows:
            reasons = sorted(self.refused, key=lambda why: -self.refused[why])
            raise ValueError(
                f"{self.model} fits no mesh of {counted(self.limits.devices, 'device')}: {'; '.join(reasons)}"
            )
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "machine": {"name": self.machine.name, "source": dict(self.machine.source)},
            **vars(self.limits),
            "dtype": str(self.limits.dtype).removeprefix("torch."),
            "plans": [row.to_json() for row in self.rows],
            "cache_bytes_per_token": self.cache,
            "refused": dict(self.refused),
        }


def plan(
    target: str | Factory | Reduced,
    *,
    machine: str | Machine = "h100x8",
    hosts: int = 1,
    devices: int | None = None,
    per_host: int | None = None,
    memory: float | None = None,
    batch: int,
    seq_len: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    capacity_factor: float | None = None,
    execution: Execution | None = None,
) -> MeshPlan:
    """Predict the time and the peak memory of a training step on every mesh of ``devices`` devices (default: all of
    ``hosts`` hosts), and sort what fits.

    ``target``: as for ``explain``, or a function that returns a model; or a ``Reduced`` of this length. ``machine``:
    the name of a published one (``tpcore plan --help`` lists them), a file of ``Machine.write``, or a ``Machine``.
    ``per_host`` and ``memory``, bytes of a device: other than the machine's. ``batch``: examples of ``seq_len`` tokens
    in a step, of all devices together. ``dtype``: of parameters and activations; below float32 Zero1 has master weights
    in float32. ``capacity_factor``: of experts. ``execution``: of another program than tpcore's, so that its meshes are
    searched.

    A step is forward and backward of microbatches, reduction, clipping and AdamW. Layers that are alike are recorded
    once. Raises ValueError for sizes that cannot be, and where no step can be recorded.
    """
    hardware = find(machine) if isinstance(machine, str) else machine
    per_host = hardware.per_host if per_host is None else per_host
    devices = hosts * per_host if devices is None else devices
    memory = hardware.memory if memory is None else memory
    sizes = {"hosts": hosts, "per_host": per_host, "devices": devices, "batch": batch, "seq_len": seq_len}
    for name, value in (sizes | {"memory": memory}).items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    limits = Limits(devices, memory, batch, seq_len, dtype, capacity_factor)
    hardware = replace(hardware, per_host=per_host, hosts=-(-devices // per_host))
    model = target if isinstance(target, Reduced) else Reduced(target, seq_len, dtype)
    try:
        model.costs(Ways(tp=2, sequence_parallel=True), 1)
    except ValueError as e:  # a model that refuses more says why in the search
        model.takes_sequence = "sequence_parallel" not in str(e)
    rows, refused = _search(model, hardware, limits, execution)
    cache = model.cache(rows[0].choice.ways.tp) if rows else None
    return MeshPlan(hardware, limits, model.name, tuple(rows), refused, cache)


def _search(
    model: Reduced, machine: Machine, limits: Limits, execution: Execution | None
) -> tuple[list[Prediction], dict[str, int]]:
    rows: list[Prediction] = []
    refused: Counter[str] = Counter()
    usable = (1 - _RESERVED) * limits.memory
    nearest = math.inf
    too_large: set[tuple[Ways, int, bool]] = set()
    for choice in _choices(model, machine, limits, execution, refused):
        larger = choice.ways, choice.pp, choice.recompute  # than one of smaller microbatches, which comes first
        shares = choice.ways.tp * choice.pp * (choice.data if execution is not None and execution.sharded else 1)
        least = model.least(shares, choice.ways.ep, choice.data, choice.zero1)
        if larger in too_large or least > usable:
            refused[_TOO_LARGE] += 1  # nothing is recorded
            continue
        try:
            row = predict(model, choice, machine)
        except ValueError as e:
            axes = ", ".join(f"{axis} {n}" for axis, n in choice.ways.mesh.axes.items() if n > 1)
            refused[f"{axes or '1 device a replica'}: {str(e).splitlines()[0]}"] += 1
            continue
        nearest = min(nearest, row.nbytes)
        if row.nbytes > usable:
            too_large.add(larger)
            refused[_TOO_LARGE] += 1
        else:
            rows.append(row)
    if _TOO_LARGE in refused:
        count = refused.pop(_TOO_LARGE)
        others = "" if nearest == math.inf else f"; the least of the others is {size(nearest)}"
        if model.experts and limits.capacity_factor is None:
            others += "; a capacity_factor, such as 1.25, bounds the tokens of a rank's experts"
        refused[f"{_TOO_LARGE}: {size(usable)}{others}"] = count
    return sorted(rows, key=lambda row: row.step), refused


def _choices(
    model: Reduced, machine: Machine, limits: Limits, execution: Execution | None, refused: Counter[str]
) -> Iterator[Choice]:
    """All that the sizes allow."""
    for tp in _divisors(min(limits.devices, machine.per_host), limits.devices):
        for cp in _divisors(max(limits.seq_len // _TOKENS, 1), limits.devices // tp):
            rest = limits.devices // tp // cp
            for ep in _divisors(rest, rest) if model.experts else [1]:
                if model.experts % ep:
                    continue
                sequence, factor = tp > 1 and model.takes_sequence, limits.capacity_factor if model.experts else None
                dispatch, context = "auto" if ep > 1 else "gathered", "auto" if cp > 1 else None
                ways = [Ways(tp, ep, cp, sequence, False, dispatch, context, factor, machine.compiled)]
                if tp > 1 and model.experts and model.experts % (tp * ep) == 0:
                    ways.append(replace(ways[0], expert_parallel=True))
                for pp in _divisors(rest // ep, rest // ep):
                    dp = rest // ep // pp
                    if why := _misfit(model, limits, pp, dp * ep, execution):
                        refused[why] += 1
                        continue
                    for way in ways:
                        yield from _loops(way, pp, dp, limits, execution)


def _misfit(model: Reduced, limits: Limits, pp: int, replicas: int, execution: Execution | None) -> str | None:
    if pp > 1 and not model.alike:
        return "pp: stages run one program, and the layers are not alike"
    if pp > 1 and model.routed:
        return "pp: stages have no loss of routers (output_router_logits)"
    stages = pp * (1 if execution is None or pp == 1 else execution.interleaved)
    if len(model.order) % stages:
        return f"pp {pp} does not divide {counted(len(model.order), 'layer')}" + (
            "" if stages == pp else f" into {stages} stages"
        )
    if limits.batch % replicas:
        return f"{limits.batch} examples are no multiple of the {replicas} replicas"
    return None


def _loops(ways: Ways, pp: int, dp: int, limits: Limits, execution: Execution | None) -> Iterator[Choice]:
    examples, data = limits.batch // (dp * ways.ep), dp * ways.ep * ways.cp
    zero1 = data > 1 or limits.dtype in (torch.bfloat16, torch.float16)
    # each rank sends 2 MiB of a bucket, so that latency is a small part
    bucket = float(next((b for b in _BUCKETS if b >= min(data, 128) // 2), _BUCKETS[-1]))
    for microbatch in _MICROBATCHES:
        count, rest = divmod(examples, microbatch)
        if rest or (execution is not None and execution.interleaved > 1 and count % pp):
            continue  # interleaved stages take microbatches in rounds of pp
        for recompute in (False, True) if pp == 1 and execution is None else (False,):
            yield Choice(ways, pp, dp, microbatch, count, recompute, zero1, bucket, execution)


def _divisors(most: int, of: int) -> list[int]:
    return [n for n in range(1, most + 1) if of % n == 0]
