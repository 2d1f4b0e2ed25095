"""Predicts the time and the memory of a training step on a mesh, from what its parts cost and what a machine can do.
``docs/plan.md`` says what is not modelled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from tpcore.train.data_parallel import BUCKET
from tpcore.train.pipeline import Schedule

from .choice import Choice
from .costs import HeldBytes, StepCosts, by_name
from .machine import Clock, Machine
from .meter import AFTER, BEFORE
from .reduced import RECORDED_BUCKET, Reduced
from .steps import execution_seconds, kept_bytes, shared, update_seconds

_UPDATE = ("reduction", "clipping", "optimizer")
_SMALL = 2.0**16  # bytes: of the numbers beside tensors


@dataclass(frozen=True)
class Prediction:
    """``memory``: bytes of a device at the peak of a step, by kind. ``seconds``: of a step, by part. ``flops``: of a
    device in a step, without those of recomputation and of idle ticks."""

    choice: Choice
    memory: Mapping[str, float]
    seconds: Mapping[str, float]
    flops: float
    tokens: int
    peak: float = field(compare=False)
    """FLOP/s of the largest matmuls."""

    @property
    def nbytes(self) -> float:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step

    @property
    def efficiency(self) -> float:
        """Of the rate that the largest matmuls reach."""
        return self.flops / self.step / self.peak

    def to_json(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "mesh": dict(choice.mesh.axes),
            "microbatch": choice.microbatch,
            "microbatches": choice.microbatches,
            "recompute": choice.recompute or (choice.pp > 1 and choice.execution is None),
            "execution": None if choice.execution is None else asdict(choice.execution),
            "zero1": choice.zero1,
            "parallelize": choice.ways.options(),
            "memory": dict(self.memory),
            "seconds": dict(self.seconds),
            "tokens_per_second": self.tokens_per_second,
            "efficiency": self.efficiency,
        }


def predict(model: Reduced, choice: Choice, machine: Machine) -> Prediction:
    """Raises ValueError where ``tpcore.parallelize`` refuses the choice, or the machine has no rate for the dtype."""
    costs = model.costs(choice.ways, choice.microbatch)
    dtype = str(model.dtype or torch.get_default_dtype()).removeprefix("torch.")
    clock = Clock(machine, choice, dtype)
    local = held_by_rank(model, costs, choice)
    if choice.execution is None:
        seconds = _seconds(model, costs, choice, clock) | _update_seconds(model, choice, local, clock)
    else:
        seconds = execution_seconds(model.order, costs, choice, choice.execution, clock)
        total, sums = local[False] + local[True], _sums(choice, local, clock)
        state = model.state(choice.zero1) * total.elements / (choice.data if choice.zero1 else 1)
        seconds |= update_seconds(model.order, costs, choice, choice.execution, clock, total, state, sums)
    runs = list(_runs(model, replace(choice, pp=1, recompute=False)))
    flops = sum(
        times * o.flops * o.times / choice.pp
        for _, phase, region, times in runs
        for o in costs.part(phase, region).operators
    )
    peak = machine.rate(dtype, math.inf)
    tokens = choice.batch * model.seq_len
    return Prediction(choice, memory_of(model, costs, choice, local), seconds, flops, tokens, peak)


def _seconds(model: Reduced, costs: StepCosts, choice: Choice, clock: Clock) -> dict[str, float]:
    """Of forward and backward, by part."""
    seconds: dict[str, float] = {}
    for name, phase, region, times in _runs(model, choice):
        durations = clock.of(costs.part(phase, region), choice.pp if region in (BEFORE, AFTER) else 1)
        for part, duration in durations.items():
            key = name if part == "compute" else part
            seconds[key] = seconds.get(key, 0.0) + times * duration
    if choice.pp > 1:
        shift = clock.collective("permute", ("pp",), costs.hidden, choice.pp)
        ends = clock.collective("broadcast", ("pp",), costs.hidden, choice.pp)
        ticks = Schedule(choice.pp, choice.microbatches).ticks
        seconds["between stages"] = 2 * ticks * shift + 2 * choice.microbatches * ends
    return seconds


def _runs(model: Reduced, choice: Choice) -> Iterator[tuple[str, str, str, float]]:
    """(what it is called, phase, region, how many times a rank runs it in a step)."""
    m = choice.microbatches
    schedule = Schedule(choice.pp, m)
    ticks = schedule.ticks if choice.pp > 1 else m
    recompute = choice.recompute or choice.pp > 1
    for region, count in Counter(model.order).items():
        share = count / choice.pp  # a stage has some of the layers, which are alike
        yield "layers", "forward", region, share * m
        yield "layers", "backward", region, share * m
        if recompute:
            yield "recomputation", "forward", region, share * m
        if choice.pp > 1:
            idle = share * (ticks - m)
            yield "idle stages", "forward", region, 2 * idle
            yield "idle stages", "backward", region, idle
    yield "embedding and loss", "forward", BEFORE, m * (2 if choice.pp > 1 else 1)
    for phase, region in (("forward", AFTER), ("backward", AFTER), ("backward", BEFORE)):
        yield "embedding and loss", phase, region, m


def held_by_rank(model: Reduced, costs: StepCosts, choice: Choice) -> dict[bool, HeldBytes]:
    """What a rank holds, of parameters that all data ranks have and of those that ep divides."""
    local = {False: HeldBytes(), True: HeldBytes()}
    for (region, expert), recorded in costs.held.items():
        local[expert and choice.ways.ep > 1] += recorded.scaled(max(model.order.count(region), 1) / choice.pp)
    return local


def _update_seconds(model: Reduced, choice: Choice, local: Mapping[bool, HeldBytes], clock: Clock) -> dict[str, float]:
    """Reduction, clipping and the optimizer: what they cost for the kept layers, scaled to all parameters."""
    total = local[False] + local[True]
    costs = model.update(choice.data, choice.zero1)
    recorded = sum(costs.held.values(), HeldBytes())
    tensors, nbytes = total.tensors / recorded.tensors, total.nbytes / recorded.nbytes
    overhead = clock.machine.overhead

    def cold(nbytes: float) -> float:
        """No cache keeps weights, gradients and moments from one tensor's turn to the next step."""
        return math.inf if nbytes > _SMALL else nbytes

    update = 0.0
    for o in by_name(o for phase in _UPDATE for o in costs.part(phase, AFTER).operators).values():
        # several for each tensor: those of buckets, whose number goes by their size
        scale = nbytes * RECORDED_BUCKET / choice.bucket_mb if o.times > 3 * recorded.tensors else tensors
        update += o.times * (scale * overhead + nbytes * o.nbytes / clock.machine.moved(o.name, cold(o.nbytes)))
    added = (choice.microbatches - 1) * total.gradient
    update += (choice.microbatches - 1) * total.tensors * overhead
    update += 3 * added / clock.machine.moved("add_", cold(added))
    return {"optimizer": update, "gradients over data ranks": _sums(choice, local, clock)}


def _sums(choice: Choice, local: Mapping[bool, HeldBytes], clock: Clock) -> float:
    """Seconds of those of gradients, and with Zero1 of the new weights' gathers, in buckets."""
    sums = 0.0
    bucket = choice.bucket_mb * 2**20 if choice.zero1 else BUCKET
    for divided, axes in ((False, ("dp", "ep", "cp")), (True, ("dp", "cp"))):
        size, part = math.prod(choice.mesh.axes[axis] for axis in axes), local[divided]
        if size > 1 and (count := math.ceil(part.gradient / bucket)):
            op = "reduce_scatter" if choice.zero1 else "all_reduce"
            spent = clock.collective(op, axes, part.gradient / count, size)
            if choice.zero1:
                spent += clock.collective("all_gather", axes, part.nbytes / count / size, size)
            sums += count * spent
    return sums


# -- memory -----------------------------------------------------------------------------------------------
def memory_of(model: Reduced, costs: StepCosts, choice: Choice, local: Mapping[bool, HeldBytes]) -> dict[str, float]:
    """At the peak of a step, by kind."""
    total = local[False] + local[True]
    ranks = {False: choice.data, True: choice.dp * choice.ways.cp} if choice.zero1 else {False: 1, True: 1}
    entries = sum(local[divided].elements / n for divided, n in ranks.items())
    parameters, gradients, state = total.nbytes, total.gradient, model.state(choice.zero1) * entries
    if choice.execution is not None:
        if choice.execution.sharded:
            parameters, gradients = shared(local, costs, choice)
        activations = kept_bytes(model.order, costs, choice, choice.execution)
    else:
        peak = (_stage_peak if choice.pp > 1 else _peak)(model, costs, choice, gradients)
        activations = max(max(peak, _update_peak(model, choice, gradients, entries)) - gradients, 0.0)
    return {"parameters": parameters, "gradients": gradients, "optimizer": state, "activations": activations}


def _update_peak(model: Reduced, choice: Choice, gradients: float, entries: float) -> float:
    """Of gradients and temporary tensors, from the reduction on. ``entries``: of parameters, that the rank steps."""
    costs = model.update(choice.data, choice.zero1)
    recorded = sum(costs.held.values(), HeldBytes())
    # the first step alone makes the state
    state = model.state(choice.zero1) * recorded.elements / (choice.data if choice.zero1 else 1)
    stepping = max(costs.part("optimizer", AFTER).excess - state, 0.0) / choice.ways.tp / choice.pp
    if not choice.zero1:
        return gradients + stepping
    # the values of the chunks are filled before the gradients are reduced, and freed after the step
    mean = entries * (recorded.nbytes / recorded.elements if model.master is None else model.master.itemsize)
    values = mean if model.master is None else 0.0  # master weights are part of the state
    bucket = min(choice.bucket_mb * 2**20, gradients) * (1 + 1 / choice.data)
    return max(gradients + values + bucket, values + mean + max(stepping, bucket))


def _peak(model: Reduced, costs: StepCosts, choice: Choice, gradients: float) -> float:
    """Of gradients, activations and temporary tensors, along the step."""
    regions = [BEFORE, *model.order, AFTER]
    live = peak = gradients if choice.microbatches > 1 else 0.0
    for phase, region in (*(("forward", r) for r in regions), *(("backward", r) for r in reversed(regions))):
        part = costs.part(phase, region)
        excess, delta = part.excess, part.delta
        if choice.recompute and region not in (BEFORE, AFTER):
            saved = costs.part("forward", region).delta
            least = min(costs.hidden, saved)
            rerun = saved - least
            excess, delta = (excess, least) if phase == "forward" else (rerun + max(excess, 0.0), delta + rerun)
        peak = max(peak, live + excess)
        live += delta
        if choice.microbatches > 1 and phase == "backward":
            live -= sum(b.gradient for (owner, _), b in costs.held.items() if owner == region)  # they were there
    return peak


def _stage_peak(model: Reduced, costs: StepCosts, choice: Choice, gradients: float) -> float:
    """Of one forward, one backward: the inputs of some microbatches, and one microbatch's work."""
    schedule = Schedule(choice.pp, choice.microbatches)
    stage = model.order[: len(model.order) // choice.pp]
    saved = sum(costs.part("forward", region).delta for region in stage)
    backward = saved + max(costs.part("backward", region).excess for region in stage)
    after = costs.part("forward", AFTER)
    loss = (after.excess + max(costs.part("backward", AFTER).excess + after.delta - after.excess, 0.0)) / choice.pp
    return gradients + (schedule.inputs_held + 2) * costs.hidden + max(backward, loss)
