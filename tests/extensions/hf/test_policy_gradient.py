"""``examples/policy_gradient.py``: a sharded policy that samples with the weights that it trains earns more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.places import ROOT


@pytest.mark.slow
@pytest.mark.processes
def test_the_reward_of_a_sharded_policy_goes_up(tmp_path: Path) -> None:
    words = "--rounds", "8", "--prompts", "4", "--rewards", str(tmp_path / "log")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "examples/policy_gradient.py",
        *words,
    ]
    env = {**os.environ, "TPCORE_BACKEND": "cpu_gloo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "log").read_text().splitlines()]
    assert len(rewards) == 8
    assert rewards[0] < 0.7 < 0.8 < rewards[-1]  # a random policy has 0.5
