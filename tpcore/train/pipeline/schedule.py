"""Which tick of a pipeline does what: arithmetic on stages and microbatches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """All stages in lockstep: at tick ``t`` stage ``r`` runs microbatch ``t - r`` forward.

    In one forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2) the same tick also
    runs microbatch ``t - 2 (stages - 1) + r`` backward. The ends of the model, before and after its layers,
    run on all stages, each with its part of the vocabulary.
    """

    stages: int
    microbatches: int

    @property
    def ticks(self) -> int:
        """Of a forward, and as many of its backward."""
        return self.microbatches + self.stages - 1

    @property
    def step_ticks(self) -> int:
        """Of a step with one forward, one backward."""
        return self.microbatches + 2 * (self.stages - 1)

    @property
    def bubble(self) -> float:
        """The share of ticks at which a stage works on no microbatch. The same of both schedules: the first
        and last ticks of one forward, one backward are halves."""
        return (self.stages - 1) / self.ticks

    @property
    def inputs_held(self) -> int:
        """Stage inputs that one forward, one backward holds at the most, whatever the microbatches."""
        return min(2 * self.stages - 1, self.ticks)

    def entering(self, tick: int) -> int:
        """The microbatch that stage 0 runs forward; in the bubble at the end the last one again."""
        return min(tick, self.microbatches - 1)

    def leaving(self, tick: int) -> int | None:
        """The microbatch whose forward ends at this tick, if one does."""
        return self._microbatch(tick - self.stages + 1)

    def returned(self, tick: int) -> int | None:
        """The microbatch whose backward has come to stage 0 at this tick, if one has."""
        return self._microbatch(tick - 2 * (self.stages - 1))

    def forward_of(self, tick: int) -> list[int]:
        """By stage, the microbatch that it runs forward; in the bubble the nearest one."""
        return [self._nearest(tick - r) for r in range(self.stages)]

    def backward_of(self, tick: int) -> list[int]:
        """By stage, the microbatch that it runs backward; in the bubble the nearest one."""
        return [self._nearest(tick - 2 * (self.stages - 1) + r) for r in range(self.stages)]

    def _microbatch(self, number: int) -> int | None:
        return number if 0 <= number < self.microbatches else None

    def _nearest(self, number: int) -> int:
        return min(max(number, 0), self.microbatches - 1)
