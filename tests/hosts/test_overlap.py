"""A ring over two hosts with a slow link: blocks of keys travel while others are computed, by its timeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import Machine, environment
from network import Network, why_not
from ringtimes import rank, read, spent

pytestmark = [
    pytest.mark.drill,  # what a shared host's wire takes differs by half a second from run to run, as much as is saved
    pytest.mark.processes,
    pytest.mark.xdist_group("kit"),
    pytest.mark.skipif(bool(why_not()), reason=f"hosts on one machine: {why_not()}"),
]
SECONDS = 300.0  # against hangs alone


def test_keys_and_gradients_travel_while_blocks_are_computed(tmp_path: Path) -> None:
    with Network(2) as network:
        for host in range(2):
            network.slow(host, "5mbit")  # 0.8 s for each block, long beside what a busy machine makes ranks wait
        machines = [Machine(network, host, tmp_path, host, 1) for host in range(2)]
        for machine in machines:  # off: comparing calls would wait for the other rank before a block is on its way
            machine.start(rank, (str(tmp_path), 2048), environment(2, check="off"))
        for machine in machines:
            machine.join(SECONDS)
            assert machine.ended(machine.ranks[0])[0] == 0, machine.printed(machine.ranks[0])
    for number in range(2):
        found = read(tmp_path, number)
        assert len({tuple(sorted(name for name, *_ in events)) for events in found.values()}) == 1
        assert sum(name == "compute" for name, *_ in found["overlaps"]) == 6, "a whole block and two halves, twice"
        blocks, overlaps = (spent(found[way]) for way in ("blocks", "overlaps"))
        # a blocking permute takes what its bytes take; waiting after a computation only what is left of that
        saved = blocks["start"] - overlaps["start"] - overlaps["wait"]
        assert saved > 0.4 * min(overlaps["compute"], blocks["start"]), (overlaps, blocks)
