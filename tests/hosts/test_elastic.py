"""A job that is killed again and again, each time at some moment, and goes on with other ranks: the losses
are those of a job that nobody killed.
"""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest
import training
from machines import Machine, environment

from tpcore.checkpoint.manifest import newest
from tpcore.layout.mesh import Mesh
from tpcore.testing import run_ranks
from tpcore_convert.inspect import verify

ENDLESS = 10**6
MESHES = [{"tp": 2}, {"tp": 1}, {"tp": 1, "pp": 2}]  # of two ranks


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def reached(home: Path) -> int:
    path = newest(str(home / "run"))
    if path is None:
        return -1
    assert verify(path) == []
    return int(path.rpartition("_")[2])


def killed(home: Path, axes: dict[str, int], draw: random.Random) -> None:
    """Go on, save once at least, then lose one rank or both at any moment."""
    machine = Machine(None, 0, home, 0, 2)
    env = environment(2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    machine.start(training.rank, (str(home), axes, ENDLESS, reached(home) + 2), env)
    (home / "told").read_bytes()
    machine.wait(draw.uniform(0, 0.5))
    if draw.random() < 0.5:
        machine.power_off()
    else:
        machine.kill(draw.randrange(2))
        machine.join(60)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.xdist_group("kit")
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.drill)])
def test_a_job_that_is_killed_again_and_again(tmp_path: Path, kills: int) -> None:
    os.mkfifo(tmp_path / "told")
    draw = random.Random(0)
    for i in range(kills):
        killed(tmp_path, MESHES[i % len(MESHES)], draw)
    steps = reached(tmp_path) + 3
    assert steps >= kills + 2
    run_ranks(Mesh({"pp": 1, "dp": 1, "tp": 1}), lambda ctx: training.train(ctx, tmp_path, steps))
    # float64: AdamW divides by small roots of sums that other meshes take in another order
    assert training.losses(tmp_path) == pytest.approx(training.undisturbed(tmp_path / "whole", steps), rel=1e-7)
    assert sorted(os.listdir(tmp_path / "run")) == sorted(f"step_{s}" for s in (steps - 2, steps - 1))
