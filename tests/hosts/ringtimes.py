"""What a rank of a ring does, and from when to when."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tpcore
from tpcore.comm.transport import Pending, Transport
from tpcore.layers import ContextParallelAttention, ring

Event = tuple[str, float, float]
"""start, wait or compute; seconds since the first began."""
WAYS = ("blocks", "overlaps")


def timeline(overlaps: bool, tokens: int) -> list[Event]:
    """Of one forward and backward with ``tokens`` a rank, without those in a ``start`` that blocks: many query heads
    share a key head, so that a block is computed for longer than it travels."""
    events: list[Event] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = function(*arguments, **options)
            events.append((name, began, time.perf_counter()))
            return found

        return noted

    attention = ContextParallelAttention("ring")
    comm = attention.order.comm
    transport: Any = comm.transport
    start = transport.start_permute if overlaps else lambda x, to: Transport.start_permute(transport, x, to)

    def started(x: torch.Tensor, to: tuple[int, ...]) -> Pending:
        wait: Pending = noting("start", start)(x, to)
        return noting("wait", wait)

    inputs = [torch.randn(1, heads, tokens, 32, requires_grad=True) for heads in (16, 1, 1)]
    attention(*inputs).sum().backward()  # connections are made
    saved = ring._kernel, ring._kernel_gradients
    transport.start_permute = started
    ring._kernel, ring._kernel_gradients = (noting("compute", function) for function in saved)
    comm.all_reduce(torch.zeros(1))  # ranks begin together
    attention(*inputs).sum().backward()
    del transport.start_permute
    ring._kernel, ring._kernel_gradients = saved
    return [(name, begin - events[0][1], end - events[0][1]) for name, begin, end in events]


def rank(home: str, tokens: int) -> None:
    """Write those of each way to ``home``."""
    ctx = tpcore.init("cpu_gloo", cp=2)
    found = {way: timeline(way == "overlaps", tokens) for way in WAYS}
    (Path(home) / f"timeline{ctx.rank}").write_text(json.dumps(found))
    tpcore.shutdown()


def spent(events: list[Event]) -> dict[str, float]:
    """Seconds by what was done."""
    return {name: sum(end - begin for what, begin, end in events if what == name) for name, *_ in events}


def read(home: Path, number: int) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = json.loads((home / f"timeline{number}").read_text())
    return found
