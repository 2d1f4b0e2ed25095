"""``tpcore verify`` on processes: a backend that is right is told so, and one that is wrong, with exit status 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import programs as forked
from helpers.distributions import installed
from test_launched import PLUGIN, environment

pytestmark = [
    *(pytest.mark.slow, pytest.mark.xdist_group("launched"), pytest.mark.processes),
    pytest.mark.usefixtures("default_checks"),
]

REVERSED = """
import sys
sys.modules["transformers"] = None  # as if it were not installed: the BERT is then torch's
from tpcore.backend import Capabilities

class Reversed(C10dTransport):
    def all_gather(self, x, dim):
        out = super().all_gather(x, dim)
        return torch.cat(out.chunk(self.size, dim)[::-1], dim) if x.is_floating_point() else out

Plain.capabilities = Capabilities(dtypes=(torch.float32, torch.int64, torch.uint8), tracing=False)
Plain._over = lambda self, group, pg: Reversed(group, self._rank, pg, self.device())
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_gloo_is_right(tp: int, tmp_path: Path) -> None:
    words = ["tpcore", "verify", "--backend", "cpu_gloo", "--tp", str(tp), "--save", "out.json"]
    done = forked.run(words, tmp_path, environment(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["backend"], report["mesh"]) == ("cpu_gloo", {"pp": 1, "dp": 1, "tp": tp})
    assert report["versions"]["torch"] == torch.__version__
    rows = report["rows"]
    names = {row["what"] for row in rows}
    assert {"all_gather", "column, sequence parallel", "checkpoint round trip"} <= names
    assert {"trace", "BERT step"} <= names
    assert ({"large", "overlap"} <= names) == (tp > 1)
    measured = {row["what"] for row in rows if row["error"] > 0}
    assert {"BERT step", *(["trace"] if tp > 1 else [])} <= measured
    assert all(row["error"] <= row["allowed"] for row in rows)
    assert not any(row["wrong"] for row in rows)
    assert "WRONG" not in done.stdout
    assert done.stdout.endswith("saved as out.json\n")


def test_a_wrong_backend_is_told_and_fails(tmp_path: Path) -> None:
    installed(tmp_path, "wrong", PLUGIN + REVERSED)
    done = forked.run(["tpcore", "verify", "--backend", "wrong"], tmp_path, environment(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "saved as tpcore-verify-wrong-tp2.json" in done.stdout  # also without being asked
    report = json.loads((tmp_path / "tpcore-verify-wrong-tp2.json").read_text())
    assert report["backend"] == "wrong"
    assert "WRONG" in done.stdout
    assert "all_gather dim" in done.stdout
