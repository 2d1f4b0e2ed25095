"""How long operators and collectives take on a machine."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tpcore.comm.transport import PRIMITIVES
from tpcore_explain.recording import Collective

from .choice import Choice
from .machine import Machine
from .meter import ATTENTION, SCORES, Operator, PartCosts


class Clock:
    """The seconds of operators and collectives as a step of ``choice`` runs them."""

    def __init__(self, machine: Machine, choice: Choice, dtype: str) -> None:
        self.machine, self._choice, self._dtype = machine, choice, dtype
        self._itemsize = getattr(torch, dtype).itemsize
        execution = choice.execution
        self._scores = execution is not None and execution.scores
        self._moved = machine.fused if execution is not None and execution.fused else 1.0

    def of(self, part: PartCosts, stages: int = 1) -> dict[str, float]:
        """By "compute" and the axes of collectives. ``stages``: that share the work, as that of the vocabulary."""
        return {"compute": self.compute(part.operators, stages), **self.sent(part.calls, stages)}

    def sent(self, calls: Iterable[tuple[Collective, float]], stages: int = 1) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for call, nbytes in calls:
            axes = ("pp", *call.axes) if stages > 1 else call.axes
            key = f"{' x '.join(axes)} collectives"
            seconds[key] = seconds.get(key, 0.0) + self.collective(call.op, axes, nbytes, call.size * stages)
        return seconds

    def compute(self, operators: Iterable[Operator], stages: int = 1) -> float:
        return sum(o.times * self.operator(o.name, o.flops / stages, o.nbytes / stages) for o in operators)

    def operator(self, name: str, flops: float, nbytes: float) -> float:
        machine = self.machine
        if name == SCORES:  # of attention that is no fused kernel, and computes the hidden half too
            return nbytes / machine.memory_bandwidth if self._scores else 0.0
        if not flops:
            return machine.overhead + self._moved * nbytes / machine.moved(name, nbytes)
        # the square matmul that computes as much with a byte, where it is the smaller one
        alike = 2.0 * (1.5 * self._itemsize * flops / nbytes) ** 3 if nbytes else math.inf
        rate = machine.rate(self._dtype, min(flops, alike))
        if name == ATTENTION:
            rate *= 0.5 if self._scores else machine.attention
        return machine.overhead + max(flops / rate, nbytes / machine.memory_bandwidth)

    def collective(self, op: str, axes: tuple[str, ...], nbytes: float, size: int) -> float:
        """Of a ring, which leaves each host once; ``nbytes``: of a rank's input."""
        if size == 1:
            return 0.0
        machine, stride, together = self.machine, 1, 1
        for axis, n in reversed(list(self._choice.mesh.axes.items())):  # ranks of the group on one host
            if axis in axes:
                together *= min(n, max(machine.per_host // stride, 1))
            stride *= n
        near, far = machine.inside, machine.between
        latency, bandwidth = near.latency, near.bandwidth
        if together < size:  # they share what leads out of their host
            latency = (far.latency + (together - 1) * near.latency) / together
            bandwidth = min(together * far.bandwidth, near.bandwidth) if together > 1 else far.bandwidth
        name = op.partition(" ")[0]
        steps = {"all_reduce": 2 * (size - 1), "permute": 1, "broadcast": math.ceil(math.log2(size))}
        sent = PRIMITIVES[name].sent(int(nbytes), size)
        return steps.get(name, size - 1) * latency + sent / bandwidth

    def exposed(self, collectives: float, compute: float) -> float:
        """What of collectives beside compute lengthens a step: what it does not cover, and what they take from it."""
        return max(collectives - compute, 0.0) + self.machine.beside * min(collectives, compute)
