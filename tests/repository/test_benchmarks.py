"""The benchmarks run: each contestant equals the unsharded module, and a table comes out."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import programs as forked
from helpers.places import ROOT
from helpers.tiers import tiers

from benchmarks.__main__ import TINY
from tpcore_plan.machine import Machine
from tpcore_plan.published import find

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("default_checks")]


def _run(module: str, *options: str) -> str:
    done = forked.run(["python", "-m", f"benchmarks.{module}", *options], ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", tiers(["mlp_block"], drill=["cross_entropy"]))
def test_race(module: str) -> None:
    printed = _run(module, *TINY[module].split())
    assert "equal those of the unsharded" in printed
    tables = printed.split("| ratio to the floor over gloo |")[1:]
    assert len(tables) == 2
    for table in (text.split("\n\n")[0] for text in tables):
        rows = [row.split("|") for row in table.splitlines()[2:] if row.startswith("|")]
        ratios = {name.strip(): ratio.strip() for _, name, _, ratio, *_ in rows if ratio.strip()}
        assert ratios["floor over gloo"] == "1.000"
        assert {"tpcore", "tpcore over gloo", "floor over shared memory"} <= ratios.keys()


PRINTED: dict[str, list[str]] = {
    f"reproducible {TINY['reproducible']}": ["| without | ", "| reproducible | "],
    "reproducible bits --steps 1 --models GPT-2": ["| GPT-2 | float32 | `", " | the same |"],
    f"import_time {TINY['import_time']}": ["| `import tpcore` |"],
    f"linears {TINY['linears']}": [*("| 2 | mapped file | ", "| 2 | huge pages | ", "| 2 | one for q, k, v | ")],
    f"context {TINY['context']}": [
        *("| one process | 1 | ", "| gather | 2 | ", "| ulysses | 2 | ", "| ring | 2 | "),
        "all that ran find equal outputs and gradients",
    ],
}
LONG: dict[str, list[str]] = {
    # a minute of programs: what it measures, tests/trace tests
    f"serve {TINY['serve']}": [
        *("| floor | ", "| tpcore | ", "| tpcore over gloo | ", "| one process, 2 threads | ", "batch 2 x 8"),
        *("tpcore: waits asleep in a call: ", "microseconds more than the slower rank's own forward"),
        *("the outputs of all 7 equal those of the unsharded encoder", "20 calls in a row"),
    ],
    # five trainings, four of them by torch's own means
    f"optimizer {TINY['optimizer']}": [
        *("| DDP, ZeroRedundancyOptimizer |", "| FSDP2, AdamW |", "| tpcore, Zero1 |"),
        "in the end all 5 hold equal weights",
    ],
    f"{(states := 'context --states --fits 1024')} {TINY[states]}": [
        *("| one process | 1 | ", "| gather | 2 | ", "| gather | 4 | ", "all losses of a length are the same")
    ],
    f"muon {TINY['muon']}": [*("| tpcore, blocks |", "| tpcore, Zero1 |", "hold equal weights")],
    # quantized layers themselves: tests/extensions/hf/test_quantized.py
    f"decoding {TINY['decoding']}": ["int8 over bfloat16, tp=2: ", "MiB of parameters on a rank"],
    # the others start processes for a minute and a half
    f"generate {TINY['generate']}": [
        *("the tokens of all 3 are the same", "transformers: ", "tpcore, one rank: ", "tpcore, tp=2: "),
        *("| transformers |", "| tpcore, one rank |", "| tpcore, tp=2 |"),
    ],
    "generate --size 'tiny experts' --rounds 2 --warm 1": [
        *("Mixtral of 4 experts", "the tokens of all 4 are the same", "tpcore, experts: ")
    ],
    f"transformers_tp {TINY['transformers_tp']}": [*("are the same)", "| tpcore |", "| tpcore, sequence_parallel |")],
    "transformers_tp --size 'tiny experts' --rounds 1 --steps 1 --warm 1": [
        *("Mixtral", "| tpcore, expert_parallel |", "| tpcore, ep |", "| tpcore, ep all_to_all |")
    ],
    f"load_model {TINY['load_model']}": ["| tpcore, tp=2 |", "| tpcore, tp=4 |", "| transformers, one process |"],
}


@pytest.mark.parametrize("command", tiers(PRINTED, drill=LONG))
def test_what_is_printed(command: str) -> None:
    printed = _run(*shlex.split(command))
    for said in (PRINTED | LONG)[command]:
        assert said in printed


def test_all_reduce() -> None:
    printed = _run("all_reduce", *TINY["all_reduce"].split())
    for title in ("all_reduce of 1 KB", "all_reduce of 100 KB"):
        table = printed.split(f"**{title}**")[1]
        for name in ("floor", "tpcore, shared memory", "tpcore, gloo", "gloo by hand"):
            assert f"| {name} |" in table


@pytest.mark.drill  # a minute of programs
def test_pipeline() -> None:
    printed = _run("pipeline", *TINY["pipeline"].split())
    for count in (2, 6):
        table = printed.split(f"**pp=2, {count} microbatches**")[1]
        for name in ("PipelinedLayers", "PipelineModel", "torch Schedule1F1B", "torch Schedule1F1B, recomputing"):
            assert f"| {name} |" in table
    few, many = (float(n) for n in printed.split("| PipelineModel |")[-1].split("|")[:2])
    assert many < 1.05 * few  # its memory does not grow with the microbatches


@pytest.mark.drill  # twelve programs, one after the other
def test_cuda_session_where_no_gpu_is(tmp_path: Path) -> None:
    """Every stage but Liger's runs on CPUs, and the curves agree."""
    out = tmp_path / "session.json"
    options = ["--backend", "cpu_gloo", "--size", "tiny", "--rounds", "1", "--out", str(out)]
    options += ["--stages", "curve", "reads", "step", "loss", "generate"]
    assert "3 of 3 curves" in _run("cuda_session", *options)
    figures = json.loads(out.read_text())["figures"]
    failed = {name: found["error"] for name, found in figures.items() if "error" in found}
    assert set(failed) <= {"loss, liger, tp=1"}
    assert figures["step, tpcore, tp=2"]["seconds"] > 0


LAUNCHER = """
import signal, subprocess, sys
rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
def leave(*_):
    rank.kill(), rank.wait(), sys.exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else leave)
open(sys.argv[1], "w").write(str(rank.pid))
signal.pause()
"""


def _runs(pid: str) -> bool:
    """Whether it still does 10 s after it was killed."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        words = b""  # also a zombie's
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if not words:
            return False
        time.sleep(0.01)
    return True


def test_a_session_ends_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every stage in its file, and without the ranks of a launcher that does not end them."""
    from benchmarks import cuda_session

    pid, options = tmp_path / "pid", Namespace(limit=5.0, out=tmp_path / "session.json")
    deaf = [sys.executable, "-c", LAUNCHER, str(pid), "deaf"]
    monkeypatch.setattr(cuda_session, "LEAVE", 2.0)
    monkeypatch.setattr(cuda_session, "stages", lambda _: [("step, 1", deaf, {}, 60.0), ("step, 2", deaf, {}, 60.0)])
    began = time.monotonic()
    cuda_session.session(options)
    assert time.monotonic() - began < options.limit
    figures = json.loads(options.out.read_text())["figures"]
    assert figures == {"step, 1": {"error": "not done after 3 s"}, "step, 2": {"error": "no time was left"}}
    assert not _runs(pid.read_text())


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun")
def test_plan_hosts(tmp_path: Path) -> None:
    find("cpu").write(tmp_path / "machine.json")
    wire = ("--delay", "2", "--rate", "50", "--seconds", "0.1")
    printed = _run("plan_hosts", *wire, "--machine", str(tmp_path / "machine.json"))
    assert "| 16,777,216 |" in printed
    machine = Machine.read(tmp_path / "machine.json")
    assert machine.hosts == 2
    assert machine.between.latency > 2e-3  # no step is faster than the wire
    assert machine.between.bandwidth < 1.1 * 50e6 / 8  # a least-squares fit: a tenth above the wire's rate
    assert "measured over 2 hosts with 50 Mbit/s and 2 ms each way" in machine.source["between"]
