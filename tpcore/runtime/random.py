"""Random numbers in replicated and in sharded regions.

Outside of ``sharded()`` torch's own generator is the replicated stream: with the same seed it draws the same
numbers on every tp rank. ``sharded()`` derives another stream from one draw of that generator and the tp
rank. So there is no second state to keep: saving, restoring or replaying torch's generator, as
``torch.utils.checkpoint`` does, also replays the sharded regions bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .context import current

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads neighbouring ranks over the seeds (Knuth, TAOCP 3, 6.4)
_MIX = 0xBF58476D1CE4E5B9  # the first multiplier of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)
_MASK = (1 << 63) - 1


def manual_seed(seed: int) -> None:
    """Seed this rank's replicated stream, on the host and on the device. Give every rank the same seed."""
    torch.manual_seed(seed)
    current().backend.manual_seed(seed)


@contextmanager
def sharded() -> Iterator[None]:
    """Draw different numbers on each tp rank inside a ``with`` block, reproducible from the seed: for dropout on
    activations cut over tp, and over cp where ranks have other tokens. All ranks of both must enter it. ValueError in a
    ``reproducible`` job, for the numbers of a rank are not those of its part at another degree."""
    ctx = current()
    if ctx.reproducible is not None:
        raise ValueError(
            f"reproducible={ctx.reproducible}: dropout where each rank has a part, of the heads, the features or the "
            "tokens, draws other numbers at another degree: set its probability to 0"
        )
    seed = draw()
    state = ctx.backend.get_rng_state()
    place = ctx.coord("tp") + ctx.mesh.axes["tp"] * ctx.mesh.coords(ctx.rank).get("cp", 0)
    ctx.backend.manual_seed((seed + (place + 1) * _GOLDEN) & _MASK)
    try:
        yield
    finally:
        ctx.backend.set_rng_state(state)


def mixed(seed: int, *places: int) -> int:
    """A seed for each combination of ``places``; the seeds of neighbouring places are far apart."""
    for place in places:
        seed = (seed + (place + 1) * _GOLDEN) & _MASK
        seed = ((seed ^ (seed >> 30)) * _MIX) & _MASK
    return seed


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of host and device with ``seed`` inside a ``with`` block; restore them after it."""
    state = get_state()
    torch.default_generator.manual_seed(seed)
    current().backend.manual_seed(seed)
    try:
        yield
    finally:
        set_state(state)


def draw() -> int:
    """A seed, drawn from the host's replicated stream."""
    return int(torch.randint(_MASK, (1,), device="cpu"))


def get_state() -> dict[str, Tensor]:
    """The state of this rank's generators, for a checkpoint; ``set_state`` restores it."""
    return {"host": torch.get_rng_state(), "device": current().backend.get_rng_state()}


def set_state(state: dict[str, Tensor]) -> None:
    current().backend.set_rng_state(state["device"])
    torch.set_rng_state(state["host"])
