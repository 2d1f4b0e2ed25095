"""``tpcore verify`` on processes: right on cpu_gloo, and exit status 1 where a backend is wrong."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import forked
import pytest
import torch
from installed import installed

pytestmark = [pytest.mark.xdist_group("verify"), pytest.mark.slow, pytest.mark.processes]

WRONG = """
import sys
sys.modules["transformers"] = None  # as if it were not installed: the BERT is then torch's
import torch
from tpcore.c10d import C10dBackend, C10dTransport
from tpcore.backend import Capabilities, hookimpl

class Reversed(C10dTransport):
    def all_gather(self, x, dim):
        out = super().all_gather(x, dim)
        return torch.cat(out.chunk(self.size, dim)[::-1], dim) if x.is_floating_point() else out

class Here(C10dBackend):
    interface = 2
    transport = "gloo"
    capabilities = Capabilities(dtypes=(torch.float32, torch.int64, torch.uint8), tracing=False)
    def device(self): return torch.device("cpu")
    def _over(self, group, pg):
        return Reversed(group, self._rank, pg, self.device())

@hookimpl
def tpcore_backend(): return Here
"""


def verify(*args: str, path: Path, save: Sequence[str] = ("--json",)) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    where = (str(path / "out.json"),) if save else ()
    env |= {"PYTHONPATH": os.pathsep.join([str(path), env.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    return forked.run(["tpcore", "verify", *args, *save, *where], path, env)


@pytest.mark.parametrize("tp", [1, 2])
def test_gloo_is_right(tp: int, tmp_path: Path) -> None:
    done = verify("--backend", "cpu_gloo", "--tp", str(tp), path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["backend"], report["mesh"]) == ("cpu_gloo", {"pp": 1, "dp": 1, "tp": tp})
    assert report["versions"]["torch"] == torch.__version__
    rows = report["rows"]
    names = {row["what"] for row in rows}
    assert {"all_gather", "column, sequence parallel", "checkpoint round trip"} <= names
    assert {"trace", "BERT step"} <= names
    assert ({"large", "no dims", "precision"} <= names) == (tp > 1)
    measured = {row["what"] for row in rows if row["error"] > 0}
    assert {"BERT step", *(["trace"] if tp > 1 else [])} <= measured
    assert all(row["error"] <= row["allowed"] for row in rows)
    assert not any(row["wrong"] for row in rows)
    assert "WRONG" not in done.stdout
    assert done.stdout.endswith(f"saved as {tmp_path / 'out.json'}\n")


def test_a_wrong_backend_is_told_and_fails(tmp_path: Path) -> None:
    installed(tmp_path, "wrong", WRONG)
    done = verify("--backend", "wrong", path=tmp_path, save=())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "saved as tpcore-verify-wrong-tp2.json" in done.stdout  # also without being asked
    report = json.loads((tmp_path / "tpcore-verify-wrong-tp2.json").read_text())
    assert report["backend"] == "wrong"
    assert "WRONG" in done.stdout
    assert "all_gather dim" in done.stdout
