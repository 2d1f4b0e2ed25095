"""``examples/ray_train.py``: two workers of Ray Train on CPUs, told, lost, and resumed on another mesh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.places import ROOT


@pytest.mark.slow
@pytest.mark.processes
def test_workers_of_ray_train_save_are_lost_and_go_on_at_another_mesh(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="ray is an environment of its own: pip install 'ray[train]'")

    def run(*words: str) -> dict[int, set[float]]:
        """The losses of each step."""
        command = [sys.executable, str(ROOT / "examples/ray_train.py"), "--storage", str(tmp_path), *words]
        env = {**os.environ, "TPCORE_BACKEND": "cpu_gloo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        losses: dict[int, set[float]] = {}
        for step, loss in re.findall(r'"step": (\d+), "loss": ([\d.]+)', done.stdout + done.stderr):
            losses.setdefault(int(step), set()).add(float(loss))
        return losses

    first = run("--tp", "2", "--steps", "4", "--told", "2", "--lost", "3")
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-2", "step-4"]
    then = run("--tp", "1", "--steps", "6")
    assert sorted(then) == [5, 6]  # from the last checkpoint on, at dp 2
    alone = run("--name", "alone", "--workers", "1", "--tp", "1", "--steps", "6")
    assert sorted(alone) == sorted(first | then) == list(range(1, 7))
    for step, losses in (first | then).items():  # step 3 twice: after the loss of a worker once more, from step 2
        assert all(loss == pytest.approx(min(alone[step]), abs=1e-5) for loss in losses)  # float32
