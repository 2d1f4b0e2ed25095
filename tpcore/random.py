"""Random numbers in replicated and in sharded regions.

Outside of ``sharded()`` torch's own generator is the replicated stream: seeded alike on every tp rank, it
draws the same numbers there. ``sharded()`` derives a stream of its own from one draw of that generator
and the tp rank. So there is no second state to keep: saving, restoring, or replaying torch's generator,
as ``torch.utils.checkpoint`` does, replays the sharded regions bit for bit as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .context import current

_GOLDEN = (
    0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads neighbouring ranks over the seeds (Knuth, TAOCP 3, 6.4)
)
_MASK = (1 << 63) - 1


def manual_seed(seed: int) -> None:
    """Seed this rank's replicated stream, on the host and on the device. Give every rank the same seed."""
    torch.manual_seed(seed)
    current().backend.manual_seed(seed)


@contextmanager
def sharded() -> Iterator[None]:
    """Draw different numbers on each tp rank, inside a ``with`` block; reproducible from the seed.

    For dropout on activations that are cut over the tp group. Use it on all tp ranks alike.
    """
    ctx = current()
    draw = int(torch.randint(_MASK, (1,), device="cpu"))
    state = ctx.backend.get_rng_state()
    ctx.backend.manual_seed((draw + (ctx.coord("tp") + 1) * _GOLDEN) & _MASK)
    try:
        yield
    finally:
        ctx.backend.set_rng_state(state)


def get_state() -> dict[str, Tensor]:
    """Everything random about this rank, for a checkpoint; ``set_state`` restores it."""
    return {"host": torch.get_rng_state(), "device": current().backend.get_rng_state()}


def set_state(state: dict[str, Tensor]) -> None:
    current().backend.set_rng_state(state["device"])
    torch.set_rng_state(state["host"])
