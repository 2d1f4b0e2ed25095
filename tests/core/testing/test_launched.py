"""The kit on processes: what is wrong is told, with exit status 1, and nothing hangs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers import programs as forked
from helpers.distributions import installed

pytestmark = [
    *(pytest.mark.slow, pytest.mark.xdist_group("launched"), pytest.mark.processes),
    pytest.mark.usefixtures("default_checks"),
]

PLUGIN = """
import torch
from tpcore.c10d import C10dBackend, C10dTransport
from tpcore.backend import hookimpl

class Plain(C10dBackend):
    interface = 2
    transport = "gloo"
    def device(self): return torch.device("cpu")

@hookimpl
def tpcore_backend(): return Plain
"""
KIT = """
import os, time
import pytest, torch
from tpcore.testing.conformance import Conformance

def body(ctx, how):
    comm = ctx.comm("tp")
    if how == "is wrong":
        return ["all_reduce is off by one"]
    if ctx.rank == 0 and how == "fails alone":
        raise RuntimeError("the driver lost its device")
    if how == "all fail":
        raise RuntimeError("all lost it")
    comm.all_reduce(torch.ones(1))  # the other rank waits here
    return []

class TestPlain(Conformance):
    backend = "plain"

    def test_before(self, run, line):
        for _ in range(20):
            wrong = run(line, body, "is wrong")
        self._check(wrong)

    def test_once(self, run, line):
        self._check(run(line, body, os.environ["HOW"]))

    def test_then(self, run, line):
        self._check(run(line, body, "nothing"))
"""


WRONG = """
class Wrong(C10dTransport):
    compares = False
    def all_gather(self, x, dim): return torch.zeros_like(super().all_gather(x, dim))
    def permute(self, x, to): return x.detach().clone()

Plain._over = lambda self, group, pg: Wrong(group, self._rank, pg, self.device())
"""


def environment(path: Path, **more: str) -> dict[str, str]:
    """Without what pytest and launchers have set, and with the plugins in ``path``."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST") and k not in ("RANK", "WORLD_SIZE")}
    return env | {"PYTHONPATH": f"{path}:{env.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", **more}


def launched(tmp_path: Path, how: str, plugin: str = PLUGIN, only: str = "before or once or then") -> str:
    installed(tmp_path, "plain", plugin)
    (tmp_path / "test_plain.py").write_text(KIT)
    words = ["torchrun", "--nproc_per_node=2", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = forked.run([*words, "test_plain.py", "-k", only], tmp_path, environment(tmp_path, HOW=how))
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_a_rank_that_fails_alone_ends_the_job(tmp_path: Path) -> None:
    """Before the 60 seconds that the other rank's collective would wait."""
    out = launched(tmp_path, "fails alone")
    assert "test_once" in out
    assert "rank 0: RuntimeError: the driver lost its device" in out
    assert "The other ranks did not come to hear of it: this process ends here" in out
    assert "test_before[dp1xtp2] (call): all_reduce is off by one" in out  # which pytest cannot say any more
    # of each rank the first twelve, and how many more; the launcher may end the second before it has said so
    assert out.count("found before: ") in (13, 2 * 13)
    assert "found before: 8 more" in out
    assert "passed" not in out  # the job has ended: nothing runs after it


def test_ranks_that_all_fail_go_on_to_the_next_test(tmp_path: Path) -> None:
    out = launched(tmp_path, "all fail")
    assert "rank 1: RuntimeError: all lost it" in out
    assert "2 failed, 1 passed" in out
    assert "ends here" not in out


def test_a_wrong_all_gather_hides_no_other_fault(tmp_path: Path) -> None:
    """It would carry what the ranks find, and the comparison of their calls."""
    out = launched(tmp_path, "", PLUGIN + WRONG, "test_values and float32")
    failed = {line.split("[")[1].split("-")[0] for line in out.splitlines() if line.startswith("FAILED")}
    assert failed >= {"all_gather", "permute"}
    assert not failed & {"all_reduce", "reduce_scatter", "broadcast", "all_to_all"}
    for primitive in ("all_gather", "permute"):
        for rank in range(2):
            assert re.search(rf"{primitive} .* on rank {rank} is ", out)
