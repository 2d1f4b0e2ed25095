"""torchrun on two hosts: ranks that are lost start again, on both hosts or on what is left of them.

``make drills`` adds the second, which waits for torchrun to give up the host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import training
from helpers.places import TESTS
from machines import Machine
from network import Network, address, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.xdist_group("kit"),
    pytest.mark.skipif(bool(why_not()), reason=f"hosts on one machine: {why_not()}"),
]
STEPS, TOLD = 8, 3
SCRIPT = """
import sys
sys.path[:0] = {path!r}
import training
training.rank({home!r}, {{"tp": 2}}, {steps}, {told})
"""


def torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import main

    main(list(words))


def started(network: Network, home: Path) -> list[Machine]:
    """An agent on each host, with two ranks to start."""
    os.mkfifo(home / "told")
    path = [str(Path(__file__).parent), str(TESTS)]
    (home / "train.py").write_text(SCRIPT.format(path=path, home=str(home), steps=STEPS, told=TOLD))
    words = ["--nnodes=1:2", "--nproc_per_node=2", "--max-restarts=2", "--rdzv-id=drill"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:29400", "--monitor-interval=0.5"]
    machines = [Machine(network, host, home, host, 1) for host in range(2)]
    for machine in machines:
        machine.start(torchrun, ([*words, str(home / "train.py")],), {"OMP_NUM_THREADS": "1"})
    return machines


def children(machine: Machine) -> list[psutil.Process]:
    """The ranks that the agent has started."""
    return [p for p in machine.processes()[0].children(recursive=True) if "train.py" in " ".join(p.cmdline())]


def finished(home: Path, machines: Sequence[Machine]) -> None:
    for machine in machines:
        machine.join(300)
        assert machine.ended(machine.host)[0] == 0, machine.printed(machine.host)
    assert training.losses(home) == pytest.approx(training.undisturbed(home / "whole", STEPS), rel=1e-9)


def test_a_rank_is_lost_and_all_start_again(tmp_path: Path) -> None:
    with Network(2) as network:
        machines = started(network, tmp_path)
        (tmp_path / "told").read_bytes()
        (tmp_path / "told").unlink()
        (tmp_path / "told").touch()  # the next job tells nobody
        children(machines[1])[0].kill()
        finished(tmp_path, machines)


@pytest.mark.drill  # torchrun takes a minute to give up a host
def test_a_host_is_lost_and_the_other_goes_on(tmp_path: Path) -> None:
    with Network(2) as network:
        machines = started(network, tmp_path)
        (tmp_path / "told").read_bytes()
        (tmp_path / "told").unlink()
        (tmp_path / "told").touch()
        network.cut(1)
        machines[1].power_off()
        finished(tmp_path, machines[:1])
