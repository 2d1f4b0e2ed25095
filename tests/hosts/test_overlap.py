"""A ring over two hosts with a slow link: blocks of keys travel while others are computed, by its timeline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import Machine, environment
from network import Network, why_not

import tpcore
from tpcore.comm.transport import Pending, Transport
from tpcore.layers import ContextParallelAttention, ring

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.xdist_group("kit"),
    pytest.mark.skipif(bool(why_not()), reason=f"hosts on one machine: {why_not()}"),
]
SECONDS = 100.0  # against hangs alone
Event = tuple[str, float, float]


def timeline(overlaps: bool) -> list[Event]:
    """What one forward and backward of a rank does, and from when to when: many query heads share a key head, so
    that a block is computed for longer than it travels."""
    events: list[Event] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = function(*arguments)
            events.append((name, began, time.perf_counter()))
            return found

        return noted

    attention = ContextParallelAttention("ring")
    transport: Any = attention.order.comm.transport
    start = transport.start_permute if overlaps else lambda x, to: Transport.start_permute(transport, x, to)

    def started(x: torch.Tensor, to: tuple[int, ...]) -> Pending:
        wait: Pending = noting("start", start)(x, to)
        return noting("wait", wait)

    inputs = [torch.randn(1, heads, 1024, 32, requires_grad=True) for heads in (16, 1, 1)]
    attention(*inputs).sum().backward()  # connections are made
    saved = ring._attended, ring._gradients
    transport.start_permute = started
    ring._attended, ring._gradients = (noting("compute", function) for function in saved)
    attention(*inputs).sum().backward()
    del transport.start_permute
    ring._attended, ring._gradients = saved
    return events


def rank(home: str) -> None:
    ctx = tpcore.init("cpu_gloo", cp=2)
    found = {name: timeline(name == "overlaps") for name in ("overlaps", "blocks")}
    (Path(home) / f"timeline{ctx.rank}").write_text(json.dumps(found))
    tpcore.shutdown()


def test_keys_and_gradients_travel_while_blocks_are_computed(tmp_path: Path) -> None:
    with Network(2) as network:
        for host in range(2):
            network.slow(host, "20mbit")
        machines = [Machine(network, host, tmp_path, host, 1) for host in range(2)]
        for machine in machines:
            machine.start(rank, (str(tmp_path),), environment(2))
        for machine in machines:
            machine.join(SECONDS)
            assert machine.ended(machine.ranks[0])[0] == 0, machine.printed(machine.ranks[0])
    for number in range(2):
        found: dict[str, list[Event]] = json.loads((tmp_path / f"timeline{number}").read_text())
        spent = {
            way: {name: sum(end - begin for what, begin, end in events if what == name) for name, *_ in events}
            for way, events in found.items()
        }
        # a blocking permute takes what its bytes take; waiting after a computation only what is left of that
        waits = spent["overlaps"]["start"] + spent["overlaps"]["wait"]
        assert waits < 0.7 * spent["blocks"]["start"], spent
