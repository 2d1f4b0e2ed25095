"""Random streams under NeuronX Distributed's names."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from ...log import inform
from ...runtime.context import current
from ...runtime.random import get_state, manual_seed, set_state, sharded

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"


class XLARNGStatesTracker:
    """Its ``fork`` is for dropout on cut activations. It has no state: streams are derived from torch's generator,
    whose state is the only one to save (``tpcore.random``)."""

    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> AbstractContextManager[None]:
        """``tpcore.random.sharded()``: different numbers on each tp rank, and in each block, whatever its ``name``."""
        return sharded()

    def add(self, name: str, seed: int) -> None:
        """A line that nothing is to add: ``tpcore.random.manual_seed`` seeds what all streams come from."""
        if current().rank == 0:
            inform(f"random stream {name!r}: seed {seed} is not needed, streams come from the one generator")

    def get_states(self) -> dict[str, Tensor]:
        """``tpcore.random.get_state()``: what all streams come from."""
        return get_state()

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Go on from what ``get_states`` gave."""
        set_state(states)

    def reset(self) -> None:
        """Nothing: there are no streams to forget."""


_TRACKER = XLARNGStatesTracker()


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    return _TRACKER


def model_parallel_xla_manual_seed(seed: int) -> None:
    """``tpcore.random.manual_seed``: call it after initialization, with the same seed on every rank."""
    manual_seed(seed)


__all__ = ["XLARNGStatesTracker", "get_xla_rng_tracker", "model_parallel_xla_manual_seed"]
