"""One forward, one backward on all stages in lockstep. The memory does not grow with the microbatches.

A tick runs the forward of one microbatch on each stage and the backward of another one, which it recomputes
from the stage's input. Inputs are stored by tick, in the same way on all ranks; data selects a stage's input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...comm.comm import Comm
from .arguments import LayerArguments, chosen
from .ends import Ends
from .fill_drain import tick, where
from .recompute import Backward
from .schedule import Schedule
from .stage import StageLayers


class Lockstep:
    """One run over all microbatches of a batch. The parameters' gradients become those of the sum of the
    scaled losses."""

    def __init__(
        self, stage: StageLayers, ends: Ends, pp: Comm, schedule: Schedule, seed: int | None, *, train: bool
    ) -> None:
        self._stage, self._ends, self._pp, self._schedule = stage, ends, pp, schedule
        self._seed, self._train = seed, train
        self._first, self._last = pp.position == 0, pp.position == pp.size - 1
        self._ring = [(i + 1) % pp.size for i in range(pp.size)]
        self._back = [(i - 1) % pp.size for i in range(pp.size)]
        self.inputs: dict[int, Tensor] = {}  # the stored ones, by tick
        self._arguments: dict[int, LayerArguments] = {}  # by microbatch
        self._entered: dict[int, Backward] = {}  # by microbatch
        self._forward: Tensor | None = None  # the activation received from the previous stage
        self._gradient: Tensor | None = None  # the gradient received from the next stage
        self._losses: list[Tensor] = []

    def run(self, end_tick: Callable[[], None]) -> Tensor:
        """The sum of the losses. ``end_tick`` is called at the end of each tick."""
        schedule = self._schedule
        for t in range(schedule.step_ticks if self._train else schedule.ticks):
            out = None
            if t < schedule.ticks:
                y = self._run_forward(t)
                out = self._run_loss(y, schedule.leaving(t))
            if self._train and t >= schedule.stages - 1:
                self._run_backward(t, out)
            self._forget(t)
            end_tick()
        return torch.stack(self._losses).sum()

    @torch.no_grad()
    def _run_forward(self, t: int) -> Tensor:
        m = self._schedule.entering(t)
        if m in self._arguments:  # the bubble at the end, where any activations will do
            feed = self.inputs[max(self.inputs)]
        else:
            feed, self._arguments[m] = self._ends.enter(m)
        x = feed if self._forward is None or self._pp.size == 1 else where(self._first, feed, self._forward)
        self.inputs[t] = x
        y = self._run_stage(x, self._schedule.forward_of(t), check=t == 0)
        self._forward = self._pp.permute(y, self._ring)
        return y

    def _run_stage(self, x: Tensor, numbers: list[int], *, check: bool = False) -> Tensor:
        """The layers' output, with the arguments of one of the microbatches ``numbers``, which are by stage."""

        def arguments() -> LayerArguments:
            return chosen([self._arguments[m] for m in numbers], self._pp, self._stage.place)

        return self._stage.run(arguments, self._seed, numbers[self._stage.place], check=check)(x)

    def _run_loss(self, y: Tensor, m: int | None) -> Tensor | None:
        """Compute the loss of the microbatch that the last stage has finished, if any, and return the
        gradient of its output. All ranks do this, each with its part of the vocabulary."""
        if m is None:
            return None
        hidden = self._pp.broadcast(y, self._pp.size - 1).detach().requires_grad_(self._train)
        with torch.set_grad_enabled(self._train):
            loss, entered = self._ends.leave(m, hidden)
        if self._train:
            self._entered[m] = entered
            self._ends.scaled(loss).backward()
        self._losses.append(loss.detach())
        return hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)

    def _run_backward(self, t: int, out: Tensor | None) -> None:
        schedule, pp = self._schedule, self._pp
        x = self._input_of(t).detach().requires_grad_()
        with torch.enable_grad():
            y = self._run_stage(x, schedule.backward_of(t))
        torch.autograd.backward(y, self._gradient_at(t, out))
        grad = x.grad if x.grad is not None else torch.zeros_like(x)
        self._gradient = pp.permute(grad, self._back)
        m = schedule.returned(t)
        if m is not None:
            self._entered.pop(m)(pp.broadcast(grad, 0))

    def _input_of(self, t: int) -> Tensor:
        """This stage's input of the microbatch whose backward it runs at tick ``t``: stage ``r`` ran its
        forward ``2 (stages - 1 - r)`` ticks ago."""
        stages, latest = self._pp.size, max(self.inputs)
        ages = [self.inputs.get(t - 2 * (stages - 1 - r), self.inputs[latest]) for r in range(stages)]
        if stages == 1:
            return ages[0]
        return torch.stack(ages).index_select(0, self._pp.position).squeeze(0)

    def _gradient_at(self, t: int, out: Tensor | None) -> Tensor:
        """The gradient of this stage's output: from the loss on the last stage, from the next stage on the
        others, and zero if there is no microbatch for backward."""
        come = [g for g in (self._gradient, out) if g is not None]
        grad = come[0] if len(come) == 1 else where(self._last, come[1], come[0])
        if self._pp.size == 1:
            return grad
        m = tick(t - 2 * (self._pp.size - 1), grad) + self._pp.position
        return where((m >= 0) & (m < self._schedule.microbatches), grad, torch.zeros_like(grad))

    def _forget(self, t: int) -> None:
        """Drop inputs and arguments that no stage needs at later ticks."""
        kept = t + 1 - 2 * (self._pp.size - 1) if self._train else t
        self.inputs = {at: x for at, x in self.inputs.items() if at >= kept}
        self._arguments = {m: a for m, a in self._arguments.items() if m >= kept - self._pp.size}
