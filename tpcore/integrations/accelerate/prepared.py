"""The optimizer and scheduler that ``prepare`` returns: their steps take the mean over dp."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from ...runtime.context import current
from ...train.step import Stepping, stepping_of


class MeshOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer whose step takes the mean of the gradients over dp, once, before or after clipping."""

    def __init__(self, optimizer: Any) -> None:
        # without placement: that would load the state back, which is collective and changes nothing here
        super().__init__(optimizer, device_placement=False)
        self._reduced: Stepping | None = None

    def reduced(self) -> Stepping:
        """The gradients after their mean over dp. Collective the first time after a step."""
        if self._reduced is None:
            self._reduced = stepping_of(self.optimizer)
            self._reduced.reduce()
        return self._reduced

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("an optimizer over a mesh takes no closure: its gradients would not be reduced")
        if not self.gradient_state.sync_gradients:
            return
        self.reduced()
        # on XLA accelerate would now sum gradients over all ranks, those of other parameters too
        self.gradient_state.is_xla_gradients_synced = True
        super().step()
        self._reduced = None
        current().backend.mark_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:
            self._reduced = None


class MeshScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A scheduler that steps once for each dp rank, whose batches one optimizer step uses."""

    def __init__(self, scheduler: Any, optimizers: Any, step_with_optimizer: bool, split: bool) -> None:
        # "split batches" is one step for each of the optimizer's
        super().__init__(scheduler, optimizers, step_with_optimizer, split_batches=True)
        self._times = 1 if split or not step_with_optimizer else current().batch.size

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self._times if self.gradient_state.sync_gradients else 1):
            super().step(*args, **kwargs)
