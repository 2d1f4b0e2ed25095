"""The conformance kit by pytest on the stand-in for Neuron, as for any backend: every check at 2, 3 and 4 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.stand_in import UNDER

pytestmark = [pytest.mark.drill, pytest.mark.processes, pytest.mark.xdist_group("native")]
KIT = """
from tpcore.testing.conformance import Conformance

class TestStandIn(Conformance):
    backend = "neuron"
    loses = ("more than 32 bits",)
"""


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_kit_passes(tmp_path: Path, world: int) -> None:
    (tmp_path / "test_conformance.py").write_text(KIT)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    words += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--kit-quick", "test_conformance.py"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST") and k not in ("RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", **UNDER["env"]}
    done = subprocess.run(words, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
