"""Searches the meshes of a number of devices, and what is chosen with each, for the fastest step that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..explain.summary import size
from ..explain.target import Factory
from .choice import Choice
from .machine import Machine
from .predict import Prediction, predict
from .published import find
from .reduced import Reduced, Ways

_MICROBATCHES = (1, 2, 4, 8, 16)
_BUCKETS = (4, 16, 64, 256)
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
    there are. ``curve``: tokens a second by number of devices, with as many examples for each."""

    machine: Machine
    limits: Limits
    model: str
    rows: tuple[Prediction, ...]
    refused: Mapping[str, int]
    curve: Mapping[int, float]
    cache: float | None = None
    """Bytes of a token's keys and values on a device, when the best plan's tp serves the model."""

    @property
    def best(self) -> Prediction:
        """Raises ValueError where nothing fits."""
        if not self.rows:
            reasons = sorted(self.refused, key=lambda why: -self.refused[why])
            raise ValueError(f"{self.model} fits no mesh of {self.limits.devices} devices: {'; '.join(reasons)}")
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        limits = self.limits
        return {
            "model": self.model,
            "machine": {"name": self.machine.name, "source": dict(self.machine.source)},
            "devices": limits.devices,
            "memory": limits.memory,
            "batch": limits.batch,
            "seq_len": limits.seq_len,
            "dtype": str(limits.dtype).removeprefix("torch."),
            "plans": [row.to_json() for row in self.rows],
            "cache_bytes_per_token": self.cache,
            "refused": dict(self.refused),
            "scaling": dict(self.curve),
        }


def plan(
    target: str | Factory,
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
    scaling: bool = False,
) -> MeshPlan:
    """Predict the time and the peak memory of a training step on every mesh of ``devices`` devices (default: all of
    ``hosts`` hosts), and sort what fits.

    ``target``: as for ``explain``: a directory with a Hugging Face ``config.json``, that file, a model class of
    transformers, or a function that returns a model. ``machine``: the name of a published one (``tpcore plan
    --help`` lists them), the file that ``tpcore plan --calibrate`` wrote, or a ``Machine``. ``per_host`` and
    ``memory``, bytes of a device: other than the machine's. ``batch``: examples of ``seq_len`` tokens in a step, of all
    devices together. ``dtype``: of parameters and activations; below float32 Zero1 has master weights in float32.
    ``capacity_factor``: of experts. ``scaling``: predict 8 to 4,096 devices too, with as many examples for each.

    A step is forward and backward of microbatches, reduction, clipping and AdamW. Layers that are alike are recorded
    once, on tensors without values. Raises ValueError for sizes that cannot be, and where no step can be recorded.
    """
    found = find(machine) if isinstance(machine, str) else machine
    per_host = found.per_host if per_host is None else per_host
    devices = hosts * per_host if devices is None else devices
    sizes = {"hosts": hosts, "per_host": per_host, "devices": devices, "batch": batch, "seq_len": seq_len}
    for name, value in (sizes | {"memory": found.memory if memory is None else memory}).items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    limits = Limits(devices, found.memory if memory is None else memory, batch, seq_len, dtype, capacity_factor)
    found = replace(found, per_host=per_host, hosts=-(-devices // per_host))
    model = Reduced(target, seq_len, dtype)
    model.takes_sequence = _takes_sequence(model)
    rows, refused = _search(model, found, limits)
    curve = _curve(model, found, limits) if scaling and rows else {}
    cache = model.cache(rows[0].choice.ways.tp) if rows else None
    return MeshPlan(found, limits, model.name, tuple(rows), refused, curve, cache)


def _search(model: Reduced, machine: Machine, limits: Limits) -> tuple[list[Prediction], dict[str, int]]:
    rows: list[Prediction] = []
    refused: dict[str, int] = {}
    usable = (1 - _RESERVED) * limits.memory
    nearest = math.inf
    too_large: set[tuple[Ways, int, bool]] = set()
    for choice in _choices(model, machine, limits, refused):
        larger = choice.ways, choice.pp, choice.recompute  # than one of smaller microbatches, which comes first
        least = model.least(choice.ways.tp * choice.pp, choice.ways.ep, choice.data, choice.zero1)
        if larger in too_large or least > usable:
            _count(refused, _TOO_LARGE)  # nothing is recorded
            continue
        try:
            row = predict(model, choice, machine)
        except ValueError as e:
            _count(refused, f"{_axes(choice.ways)}: {str(e).splitlines()[0]}")
            continue
        nearest = min(nearest, row.nbytes)
        if row.nbytes > usable:
            too_large.add(larger)
            _count(refused, _TOO_LARGE)
        else:
            rows.append(row)
    if _TOO_LARGE in refused:
        count = refused.pop(_TOO_LARGE)
        others = "" if nearest == math.inf else f"; the least of the others is {size(nearest)}"
        if model.experts and limits.capacity_factor is None:
            others += "; a capacity_factor, such as 1.25, bounds the tokens of a rank's experts"
        refused[f"{_TOO_LARGE}: {size(usable)}{others}"] = count
    return sorted(rows, key=lambda row: row.step), refused


def _takes_sequence(model: Reduced) -> bool:
    """Whether ``parallelize`` takes sequence_parallel for it; a model that refuses more says why in the search."""
    try:
        model.costs(Ways(tp=2, sequence_parallel=True), 1)
    except ValueError as e:
        return "sequence_parallel" not in str(e)
    return True


_TOO_LARGE = "more memory than a device has for it"


def _count(refused: dict[str, int], why: str) -> None:
    refused[why] = refused.get(why, 0) + 1


def _axes(ways: Ways) -> str:
    return ", ".join(f"{axis} {n}" for axis, n in ways.mesh.axes.items() if n > 1) or "1 device a replica"


def _choices(model: Reduced, machine: Machine, limits: Limits, refused: dict[str, int]) -> Iterator[Choice]:
    """All that the sizes allow."""
    half = limits.dtype in (torch.bfloat16, torch.float16)
    for tp in _divisors(min(limits.devices, machine.per_host), limits.devices):
        for cp in _divisors(max(limits.seq_len // _TOKENS, 1), limits.devices // tp):
            for ep in _expert_ranks(model, limits.devices // tp // cp):
                rest = limits.devices // tp // cp // ep
                for pp in _divisors(rest, rest):
                    dp = rest // pp
                    if pp > 1 and not _stages_fit(model, pp, refused):
                        continue
                    if limits.batch % (dp * ep):
                        _count(refused, f"{limits.batch} examples are no multiple of the {dp * ep} replicas")
                        continue
                    for ways in _ways(model, machine, limits, tp, ep, cp):
                        yield from _loops(ways, pp, dp, limits, half)


_TOKENS = 4096  # of an example that a rank has at least


def _loops(ways: Ways, pp: int, dp: int, limits: Limits, half: bool) -> Iterator[Choice]:
    each = limits.batch // (dp * ways.ep)
    for microbatch in _MICROBATCHES:
        if each % microbatch:
            continue
        zero1 = half or dp * ways.ep * ways.cp > 1
        choice = Choice(ways, pp, dp, microbatch, each // microbatch, False, zero1)
        choice = replace(choice, bucket_mb=_bucket(choice.data))
        yield choice
        if pp == 1:
            yield replace(choice, recompute=True)


def _bucket(data: int) -> float:
    """MiB: each rank sends 2 MiB of one, so that latency is a small part."""
    return float(next((b for b in _BUCKETS if b >= min(data, 128) // 2), _BUCKETS[-1]))


def _ways(model: Reduced, machine: Machine, limits: Limits, tp: int, ep: int, cp: int) -> Iterator[Ways]:
    ways = Ways(
        tp=tp,
        ep=ep,
        cp=cp,
        sequence_parallel=tp > 1 and model.takes_sequence,
        dispatch="auto" if ep > 1 else "gathered",
        context_parallel="auto" if cp > 1 else None,
        capacity_factor=limits.capacity_factor if model.experts else None,
        compiled=machine.compiled,
    )
    yield ways
    if tp > 1 and model.experts and model.experts % (tp * ep) == 0:
        yield replace(ways, expert_parallel=True)


def _expert_ranks(model: Reduced, most: int) -> list[int]:
    return [ep for ep in _divisors(most, most) if model.experts % ep == 0] if model.experts else [1]


def _stages_fit(model: Reduced, pp: int, refused: dict[str, int]) -> bool:
    if not model.alike:
        _count(refused, "pp: stages run one program, and the layers are not alike")
        return False
    if model.routed:
        _count(refused, "pp: stages have no loss of routers (output_router_logits)")
        return False
    if len(model.order) % pp:
        _count(refused, f"pp {pp} does not divide {len(model.order)} layers")
        return False
    return True


def _divisors(most: int, of: int) -> list[int]:
    return [n for n in range(1, most + 1) if of % n == 0]


def _curve(model: Reduced, machine: Machine, limits: Limits) -> dict[int, float]:
    """Weak scaling: as many examples for each device."""
    found = {}
    for devices in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        batch = limits.batch * devices // limits.devices
        if not batch:
            continue
        hosts = -(-devices // machine.per_host)
        rows, _ = _search(model, replace(machine, hosts=hosts), replace(limits, devices=devices, batch=batch))
        if rows:
            found[devices] = rows[0].tokens_per_second
    return found
