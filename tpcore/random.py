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
_MIX = 0xBF58476D1CE4E5B9  # the first multiplier of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)
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
    seed = draw()
    state = ctx.backend.get_rng_state()
    ctx.backend.manual_seed((seed + (ctx.coord("tp") + 1) * _GOLDEN) & _MASK)
    try:
        yield
    finally:
        ctx.backend.set_rng_state(state)


def mixed(seed: int, *places: int) -> int:
    """A seed for each combination of ``places``, none of which is near another."""
    for place in places:
        seed = (seed + (place + 1) * _GOLDEN) & _MASK
        seed = ((seed ^ (seed >> 30)) * _MIX) & _MASK
    return seed


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw what ``seed`` gives, on the host and the device, inside a ``with`` block; after it all goes on as
    if nothing had been drawn."""
    state = get_state()
    torch.default_generator.manual_seed(seed)
    current().backend.manual_seed(seed)
    try:
        yield
    finally:
        set_state(state)


def draw() -> int:
    """A seed out of the replicated stream of the host."""
    return int(torch.randint(_MASK, (1,), device="cpu"))


def get_state() -> dict[str, Tensor]:
    """Everything random about this rank, for a checkpoint; ``set_state`` restores it."""
    return {"host": torch.get_rng_state(), "device": current().backend.get_rng_state()}


def set_state(state: dict[str, Tensor]) -> None:
    current().backend.set_rng_state(state["device"])
    torch.set_rng_state(state["host"])
