"""The memory of a device at the peak of a step, from what each part of a model holds."""

from __future__ import annotations

from collections.abc import Mapping

from ...train.pipeline import Schedule
from .choice import Choice
from .costs import HeldBytes, PartCosts, StepCosts
from .meter import AFTER, BEFORE
from .reduced import Reduced


def memory_of(model: Reduced, costs: StepCosts, choice: Choice, held: Mapping[bool, HeldBytes]) -> dict[str, float]:
    """At the peak of a step, by kind."""
    total = held[False] + held[True]
    ranks = {False: choice.data, True: choice.dp * choice.ways.cp} if choice.zero1 else {False: 1, True: 1}
    state = model.state(choice.zero1) * sum(held[divided].elements / n for divided, n in ranks.items())
    update = model.update(choice.data, choice.zero1)
    kept = update.part("optimizer", AFTER)
    temporary = max(kept.excess - max(kept.delta, 0.0), 0.0) / choice.ways.tp / choice.pp
    gradients = total.gradient
    peak_of = _stage_peak if choice.pp > 1 else _peak
    peak = max(peak_of(model, costs, choice, gradients), temporary + gradients)
    return {
        "parameters": total.nbytes,
        "gradients": gradients,
        "optimizer": state,
        "activations": max(peak - gradients, 0.0),
    }


def _peak(model: Reduced, costs: StepCosts, choice: Choice, gradients: float) -> float:
    """Of gradients, activations and temporary tensors."""
    live = gradients if choice.microbatches > 1 else 0.0
    peak = live
    layers: list[tuple[PartCosts, PartCosts]] = [
        (costs.part("forward", r), costs.part("backward", r)) for r in model.order
    ]
    timeline: list[tuple[float, float]] = []
    ends = [costs.part(phase, region) for phase, region in _ENDS]
    timeline.append((ends[0].excess, ends[0].delta))
    for forward, _ in layers:
        kept = min(costs.hidden, forward.delta) if choice.recompute else forward.delta
        timeline.append((forward.excess, kept))
    timeline += [(ends[1].excess, ends[1].delta), (ends[2].excess, ends[2].delta)]
    for forward, backward in reversed(layers):
        if choice.recompute:
            inner = forward.delta - min(costs.hidden, forward.delta)
            timeline.append((inner + max(backward.excess, 0.0), backward.delta + inner))
        else:
            timeline.append((backward.excess, backward.delta))
    timeline.append((ends[3].excess, ends[3].delta))
    for excess, delta in timeline:
        peak = max(peak, live + excess)
        live += delta
    return peak


_ENDS = (("forward", BEFORE), ("forward", AFTER), ("backward", AFTER), ("backward", BEFORE))


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
