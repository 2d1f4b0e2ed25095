"""The schedule of a pipeline: which microbatch each stage runs at each tick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """All stages in lockstep: at tick ``t`` stage ``r`` runs microbatch ``t - r`` forward.

    In one forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2) the same tick also
    runs the backward of microbatch ``t - 2 (stages - 1) + r``. The parts of the model before and after its
    layers run on all stages, each with its part of the vocabulary.
    """

    stages: int
    microbatches: int

    @property
    def ticks(self) -> int:
        """The ticks of a forward; its backward has as many."""
        return self.microbatches + self.stages - 1

    @property
    def step_ticks(self) -> int:
        """The ticks of a step with one forward, one backward."""
        return self.microbatches + 2 * (self.stages - 1)

    @property
    def bubble(self) -> float:
        """The fraction of ticks at which a stage works on no microbatch. It is equal for both schedules: the first and
        last ticks of one forward, one backward do half the work."""
        return (self.stages - 1) / self.ticks

    @property
    def inputs_held(self) -> int:
        """The most stage inputs that one forward, one backward stores, for any number of microbatches."""
        return min(2 * self.stages - 1, self.ticks)

    def entering(self, tick: int) -> int:
        """The microbatch whose forward stage 0 runs; in the bubble at the end the last one again."""
        return min(tick, self.microbatches - 1)

    def leaving(self, tick: int) -> int | None:
        """The microbatch whose forward ends at this tick, if any."""
        return self._microbatch(tick - self.stages + 1)

    def returned(self, tick: int) -> int | None:
        """The microbatch whose backward ends on stage 0 at this tick, if any."""
        return self._microbatch(tick - 2 * (self.stages - 1))

    def forward_of(self, tick: int) -> list[int]:
        """For each stage, the microbatch whose forward it runs; in the bubble the nearest one."""
        return [self._nearest(tick - r) for r in range(self.stages)]

    def backward_of(self, tick: int) -> list[int]:
        """For each stage, the microbatch whose backward it runs; in the bubble the nearest one."""
        return [self._nearest(tick - 2 * (self.stages - 1) + r) for r in range(self.stages)]

    def _microbatch(self, number: int) -> int | None:
        return number if 0 <= number < self.microbatches else None

    def _nearest(self, number: int) -> int:
        return min(max(number, 0), self.microbatches - 1)
