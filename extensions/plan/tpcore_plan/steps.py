"""The time and the memory of a step as another program than tpcore's runs it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from .choice import Choice
from .costs import HeldBytes, StepCosts
from .execution import Execution
from .machine import Clock
from .meter import AFTER, BEFORE, SCORES

_ENDS = "embedding and loss"
_DATA = ("dp", "ep", "cp")
_REDUCED = 4  # bytes of an element of a gradient that FSDP sums


def execution_seconds(
    order: list[str], costs: StepCosts, choice: Choice, execution: Execution, clock: Clock
) -> dict[str, float]:
    """Of forward and backward of all microbatches, by part. The slowest stage is the last one, with the loss."""
    seconds: dict[str, float] = defaultdict(float)
    counts = {region: count / choice.pp for region, count in Counter(order).items()}
    for region, share in ({BEFORE: 1.0 if choice.pp == 1 else 0.0} | counts | {AFTER: 1.0}).items():
        for phase in ("forward", "backward"):
            for name, duration in _region(costs, choice, execution, clock, phase, region).items():
                seconds[name] += share * duration
    once = sum(duration for name, duration in seconds.items() if name != _ENDS)
    total = {name: choice.microbatches * duration for name, duration in seconds.items()}
    if choice.pp > 1:
        total["idle stages"] = (choice.pp - 1) / execution.interleaved * once
        shift = clock.collective("permute", ("pp",), costs.hidden, choice.pp)
        if not choice.ways.sequence_parallel:
            shift /= choice.ways.tp  # each rank of tp sends its part, and all have it whole again inside a host
        if "pp" not in execution.overlap:
            total["between stages"] = 2 * (choice.microbatches * execution.interleaved + choice.pp - 1) * shift
    return total


def _region(
    costs: StepCosts, choice: Choice, execution: Execution, clock: Clock, phase: str, region: str
) -> dict[str, float]:
    """Seconds of one region for one microbatch."""
    part, ends = costs.part(phase, region), region in (BEFORE, AFTER)
    spent = {_ENDS if ends else "layers": clock.compute(part.operators)}
    calls = list(part.calls)
    if phase == "backward" and not ends:
        forward = costs.part("forward", region)
        spent["recomputation"] = clock.compute(execution.again(forward.operators))
        calls += forward.calls if execution.recompute == "layers" else []
    compute = sum(spent.values())
    sent = clock.sent(calls)
    if execution.sharded:
        sent["dp parameters and gradients"] = _gathered(costs, choice, clock, phase, region)
    for key, duration in sent.items():
        beside = set(key.split()) & set(choice.mesh.axes) <= set(execution.overlap)
        spent[key] = clock.exposed(duration, compute) if beside else duration
    return spent


def _gathered(costs: StepCosts, choice: Choice, clock: Clock, phase: str, region: str) -> float:
    """Seconds that FSDP sends for a region in a phase: parameters in both, gradients in backward."""
    held = [part for (owner, _), part in costs.held.items() if owner == region]
    duration = 0.0
    for part in held:
        duration += clock.collective("all_gather", _DATA, part.nbytes / choice.data, choice.data)
        if phase == "backward":
            duration += clock.collective("reduce_scatter", _DATA, _REDUCED * part.elements, choice.data)
    return duration


def update_seconds(
    order: list[str],
    costs: StepCosts,
    choice: Choice,
    execution: Execution,
    clock: Clock,
    total: HeldBytes,
    state: float,
    sums: float,
) -> dict[str, float]:
    """Of the end of a step: a kernel steps all tensors; gradients were added where they were made. ``state``: bytes of
    the optimizer's on a rank. ``sums``: seconds of those of gradients over data ranks."""
    ranks = choice.data if choice.zero1 or execution.sharded else 1
    nbytes = 2 * (state + (total.nbytes + total.gradient) / ranks)
    seconds = {"optimizer": nbytes / clock.machine.memory_bandwidth}
    if not execution.sharded:
        backward = clock.compute(o for region in order for o in costs.part("backward", region).operators) / choice.pp
        seconds["gradients over data ranks"] = clock.exposed(sums, backward if "dp" in execution.overlap else 0.0)
    return seconds


# -- memory -----------------------------------------------------------------------------------------------
def kept_bytes(order: list[str], costs: StepCosts, choice: Choice, execution: Execution) -> float:
    """Activations at the peak of a device's stages."""
    stage, interleaved = order[: len(order) // choice.pp], execution.interleaved
    saved = sum(_saved(costs, region, execution) for region in stage)
    inside = choice.pp + (choice.pp - 1) / interleaved if interleaved > 1 else choice.pp  # microbatches of one stage
    working = max(costs.part("backward", region).excess for region in stage)
    working = max(working, costs.part("forward", AFTER).excess)
    if execution.recompute == "layers":
        working += max(costs.part("forward", region).delta for region in stage)
    return min(inside, choice.microbatches * 1.0) * saved + max(working, 0.0)


def _saved(costs: StepCosts, region: str, execution: Execution) -> float:
    """Of a layer, from forward to backward."""
    forward = costs.part("forward", region)
    if execution.recompute == "layers":
        return min(costs.hidden, forward.delta)
    if execution.recompute == "half":
        return forward.delta / 2
    scores = sum(o.nbytes * o.times for o in forward.operators if o.name == SCORES)
    return forward.delta + (scores / 2 if execution.scores and execution.recompute == "nothing" else 0.0)


def shared(local: Mapping[bool, HeldBytes], costs: StepCosts, choice: Choice) -> tuple[float, float]:
    """Bytes of parameters and gradients on a rank under FSDP: its part of all, and two layers whole."""
    total = local[False] + local[True]
    largest = max((part for part in costs.held.values()), key=lambda part: part.nbytes)
    return total.nbytes / choice.data + 2 * largest.nbytes, total.gradient / choice.data + largest.gradient
