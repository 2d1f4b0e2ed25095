"""The memory of a device at the peak of a step, from what each part of a model holds."""

from __future__ import annotations

from collections.abc import Mapping

from ...train.pipeline import Schedule
from .choice import Choice
from .costs import HeldBytes, StepCosts
from .meter import AFTER, BEFORE
from .reduced import Reduced


def memory_of(model: Reduced, costs: StepCosts, choice: Choice, held: Mapping[bool, HeldBytes]) -> dict[str, float]:
    """At the peak of a step, by kind."""
    total = held[False] + held[True]
    ranks = {False: choice.data, True: choice.dp * choice.ways.cp} if choice.zero1 else {False: 1, True: 1}
    entries = sum(held[divided].elements / n for divided, n in ranks.items())
    gradients = total.gradient
    peak_of = _stage_peak if choice.pp > 1 else _peak
    peak = max(peak_of(model, costs, choice, gradients), _update_peak(model, choice, gradients, entries))
    return {
        "parameters": total.nbytes,
        "gradients": gradients,
        "optimizer": model.state(choice.zero1) * entries,
        "activations": max(peak - gradients, 0.0),
    }


def _update_peak(model: Reduced, choice: Choice, gradients: float, entries: float) -> float:
    """Of gradients and temporary tensors, from the reduction on. ``entries``: of parameters, that the rank steps."""
    costs = model.update(choice.data, choice.zero1)
    kept = sum(costs.held.values(), HeldBytes())
    new = model.state(choice.zero1) * kept.elements / (choice.data if choice.zero1 else 1)  # in the first step alone
    stepping = max(costs.part("optimizer", AFTER).excess - new, 0.0) / choice.ways.tp / choice.pp
    if not choice.zero1:
        return gradients + stepping
    # the values of the chunks are filled before the gradients are reduced, and freed after the step
    mean = entries * (kept.nbytes / kept.elements if model.master is None else model.master.itemsize)
    values = mean if model.master is None else 0.0  # master weights are part of the state
    bucket = choice.bucket_mb * 2**20 * (1 + 1 / choice.data)
    return max(gradients + values + bucket, values + mean + max(stepping, bucket))


def _peak(model: Reduced, costs: StepCosts, choice: Choice, gradients: float) -> float:
    """Of gradients, activations and temporary tensors, along the step."""
    timeline = [_at(costs, "forward", BEFORE)]
    for region in model.order:
        excess, delta = _at(costs, "forward", region)
        timeline.append((excess, min(costs.hidden, delta) if choice.recompute else delta))
    timeline += [_at(costs, "forward", AFTER), _at(costs, "backward", AFTER)]
    for region in reversed(model.order):
        excess, delta = _at(costs, "backward", region)
        if choice.recompute:
            kept = _at(costs, "forward", region)[1]
            again = kept - min(costs.hidden, kept)
            excess, delta = again + max(excess, 0.0), delta + again
        timeline.append((excess, delta))
    timeline.append(_at(costs, "backward", BEFORE))
    regions = [BEFORE, *model.order, AFTER, AFTER, *reversed(model.order), BEFORE]
    live = peak = gradients if choice.microbatches > 1 else 0.0
    for place, (region, (excess, delta)) in enumerate(zip(regions, timeline, strict=True)):
        peak = max(peak, live + excess)
        live += delta
        if choice.microbatches > 1 and place >= len(regions) // 2:
            live -= sum(held.gradient for (of, _), held in costs.held.items() if of == region)  # they were there
    return peak


def _at(costs: StepCosts, phase: str, region: str) -> tuple[float, float]:
    part = costs.part(phase, region)
    return part.excess, part.delta


def _stage_peak(model: Reduced, costs: StepCosts, choice: Choice, gradients: float) -> float:
    """Of one forward, one backward: the inputs of some microbatches, and one microbatch's work."""
    schedule = Schedule(choice.pp, choice.microbatches)
    one = model.order[: len(model.order) // choice.pp]
    layers = [(costs.part("forward", r), costs.part("backward", r)) for r in one]
    kept = sum(forward.delta for forward, _ in layers)
    backward = kept + max(back.excess for _, back in layers)
    after = costs.part("forward", AFTER)
    loss = (after.excess + max(costs.part("backward", AFTER).excess + after.delta - after.excess, 0.0)) / choice.pp
    return gradients + (schedule.inputs_held + 2) * costs.hidden + max(backward, loss)
