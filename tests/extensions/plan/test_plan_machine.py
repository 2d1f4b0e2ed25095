"""Machines for planning: published figures, files, measured ones and pictures."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.calibrate import calibrate
from benchmarks.links import AllReduce, fit
from benchmarks.plan_published import FITTED as SEEN
from benchmarks.plan_published import KEPT, RUNS, Models, Run
from tpcore_explain.summary import save_pictures
from tpcore_plan.machine import Machine
from tpcore_plan.published import FITTED, PUBLISHED, find


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_machine_is_the_same_after_its_file(name: str, tmp_path: Path) -> None:
    path, machine = tmp_path / "machine.json", replace(find(name), hosts=3)
    machine.write(path)
    assert find(str(path)) == machine == Machine.read(path)
    assert machine.devices == 3 * machine.per_host
    measured = {"per_host", "memory", "flops", "memory_bandwidth", "overhead", "inside", "between"}
    assert set(machine.source) == measured  # each figure has a source


def test_a_large_matmul_nears_the_fitted_part_of_the_peak() -> None:
    h100, reached = find("h100x8"), FITTED["h100x8"]
    assert h100.rate("bfloat16", 1e16) == pytest.approx(reached.matmul * 989.4e12, rel=0.05)  # memory's part
    assert h100.rate("bfloat16", 1) < h100.rate("bfloat16", 1e9) < h100.rate("bfloat16", 1e12)
    assert h100.inside.bandwidth == reached.link * 450e9
    assert h100.source["inside"].endswith("95% of it fitted to public runs")
    with pytest.raises(ValueError, match="h100x8 has no matmul rate for 'float8'; it has bfloat16, float16, float32"):
        h100.rate("float8", 1e9)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("memory", 1.5, "memory must be a whole number above 0, not 1.5"),
        ("per_host", True, "per_host must be a whole number above 0, not True"),
        ("name", 7, "name must be a text, not 7"),
        ("overhead", -1.0, "overhead must be a number of at least 0, not -1.0"),
        ("attention", "yes", "attention must be a number above 0, not 'yes'"),
        ("memory_bandwidth", "fast", "memory_bandwidth must be a number above 0, not 'fast'"),
        ("inside", {"latency": 1}, "inside must be an object of latency and bandwidth, not {'latency': 1}"),
        ("between", {"latency": 0, "bandwidth": 0}, "between.bandwidth must be a number above 0, not 0"),
        ("flops", {}, "flops must name at least one dtype"),
        ("flops", {"float32": [1, 2]}, "flops.float32 must be pairs of FLOPs and FLOP/s, not [1, 2]"),
        ("flops", {"float32": [[2, 1], [2, 1]]}, "flops.float32 must be pairs with ascending FLOPs"),
        ("flops", {"float32": []}, "flops.float32 must be pairs with ascending FLOPs, at least one, not ()"),
        ("colour", "red", "unknown field 'colour' with 'red'"),
    ],
)
def test_a_wrong_file_is_one_error_with_field_and_value(field: str, value: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    find("cpu").write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=re.escape(f"{path} describes no machine: {text}")):
        Machine.read(path)


def test_a_file_of_something_else_and_an_unknown_machine(tmp_path: Path) -> None:
    for content, text in (("[]", r"holds \[\]"), ('{"name": "x"}', "'per_host' is missing"), ("{", "Expecting")):
        (tmp_path / "m.json").write_text(content)
        with pytest.raises(ValueError, match=text):
            Machine.read(tmp_path / "m.json")
    with pytest.raises(ValueError, match=r"no machine 'h100x9': it is neither a file nor one of trn1.32xlarge, "):
        find("h100x9")
    with pytest.raises(ValueError, match="hosts must be a whole number above 0, not 0"):
        replace(find("cpu"), hosts=0)


# -- measured ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("latency", "bandwidth"), [(20e-6, 1e9), (0.0, 5e9), (1e-3, 1e7)])
def test_the_fit_finds_a_link_from_its_rings(latency: float, bandwidth: float) -> None:
    calls = [AllReduce(n, 4**k, 0.0) for n in (2, 4, 8) for k in range(5, 12)]
    calls = [replace(c, seconds=c.steps * latency + c.sent / bandwidth) for c in calls]
    link, error = fit(calls)
    assert link.latency == pytest.approx(latency, abs=1e-12)
    assert link.bandwidth == pytest.approx(bandwidth)
    assert error < 1e-9


def test_a_fit_never_has_a_negative_latency_or_bandwidth() -> None:
    dearer, cheaper = (lambda n: n * (1e-9 + 1e-12 * n)), (lambda n: 1e-3 / n)  # the larger
    assert fit([AllReduce(2, 4**k, dearer(4.0**k)) for k in range(5, 12)])[0].latency == 0
    assert fit([AllReduce(2, 4**k, cheaper(4.0**k)) for k in range(5, 12)])[0].bandwidth > 0


@pytest.mark.slow
def test_calibration_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPCORE_CHECK")
    path = tmp_path / "machine.json"
    machine = calibrate(path, devices=2, backend="cpu_gloo", seconds=2)
    assert Machine.read(path) == machine
    assert machine.per_host == 2
    assert set(machine.flops) == {"float32", "bfloat16", "float64"}
    assert all("measured" in text and "2 ranks over cpu_gloo" in text for text in machine.source.values())
    assert all(curve[0][0] == 2 * 64**3 and len(curve) > 2 for curve in machine.flops.values())
    assert 0 < 2 * machine.memory <= psutil.virtual_memory().total


# -- pictures -------------------------------------------------------------------------------------------
ROWS = [
    {"mesh": f"dp={i} tp=2", "memory": {"parameters": 1e9, "activations": i * 1e9}, "seconds": {"compute": 1 / i}}
    for i in range(1, 13)
]


def test_plans_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [*ROWS[:3], {**ROWS[3], "seconds": {"compute": 0.1, "collectives": 0.2}}, *ROWS[4:]]
    save_pictures(rows, tmp_path / "plan.svg", title="a title", limit=16e9)
    drawn = (tmp_path / "plan.svg").read_text()
    labels = ("a title", "dp=10 tp=2", "parameters", "activations", "collectives")
    assert all(f"<!-- {label} -->" in drawn for label in labels)
    assert "<!-- dp=11 tp=2 -->" not in drawn  # the best ten


# -- what others published ------------------------------------------------------------------------------
@pytest.mark.parametrize("run", [r for r in RUNS if r.mfu is not None], ids=lambda r: r.name)
def test_the_utilization_of_a_published_run_is_the_published_one(run: Run) -> None:
    assert run.utilization(run.seconds) == pytest.approx(run.mfu, abs=0.002)  # published to three digits


@pytest.mark.slow
def test_steps_that_no_fit_has_seen_are_predicted(tmp_path: Path) -> None:
    models = Models(tmp_path)
    assert len(KEPT) + len(SEEN) == len(RUNS) > 2 * 18
    assert {run.source for run in KEPT} == {run.source for run in SEEN}
    for half, most in ((SEEN, 0.04), (KEPT, 0.04)):  # the table of benchmarks/README.md: 2.9 % and 2.5 %
        assert statistics.median(models.off(run) for run in half) < most
    assert max(map(models.off, KEPT)) < 0.15  # 405B over two axes: 13 %
