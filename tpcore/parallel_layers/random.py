"""Random streams under NeuronX Distributed's names."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..random import manual_seed, sharded

_STREAM = "model-parallel-rng"  # the one name that NeuronX Distributed's own seeding registers


class XLARNGStatesTracker:
    """Its ``fork`` is for dropout on cut activations. It has no state: see ``tpcore.random``."""

    def fork(self, name: str = _STREAM) -> AbstractContextManager[None]:
        """``tpcore.random.sharded()``: different numbers on each tp rank inside a ``with`` block."""
        if name != _STREAM:
            raise ValueError(f"no random stream {name!r}, only {_STREAM!r}; see tpcore.random")
        return sharded()


_TRACKER = XLARNGStatesTracker()


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    return _TRACKER


def model_parallel_xla_manual_seed(seed: int) -> None:
    """``tpcore.random.manual_seed``: call it after initialization, with the same seed on every rank."""
    manual_seed(seed)


__all__ = ["XLARNGStatesTracker", "get_xla_rng_tracker", "model_parallel_xla_manual_seed"]
