"""docs/correctness.md is what its generator makes of the stored measurements, and says when and with what."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.places import ROOT

from benchmarks.correctness_page import page
from tpcore_explain.verify.report import Report

DOCS = ROOT / "docs"
STORED = sorted((DOCS / "verified").glob("*.json"))


def test_the_page_is_generated() -> None:
    assert (DOCS / "correctness.md").read_text() == page(DOCS / "verified"), "run make correctness"


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.stem)
def test_it_says_when_and_with_what(path: Path) -> None:
    report = Report.from_json(path.read_text())
    section = (DOCS / "correctness.md").read_text().partition(f"## {report.backend}, tp{report.mesh['tp']}\n")[2]
    line = section.splitlines()[1]
    assert re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC, tpcore \S+, torch \S+, python \S+, ", line)
    assert line.endswith("cores. Nothing is wrong.")


def test_cpu_gloo_was_measured_at_two_degrees_with_everything() -> None:
    reports = [Report.from_json(path.read_text()) for path in STORED]
    assert {r.mesh["tp"] for r in reports if r.backend == "cpu_gloo"} >= {2, 4}
    for report in reports:
        assert {"all_reduce", "column", "checkpoint round trip", "BERT step"} <= {row.what for row in report.rows}
        assert report.wrong == []


def test_what_was_measured_without_hardware_says_so() -> None:
    report = Report.from_json((DOCS / "verified/neuron-tp2.json").read_text())
    assert "torch_xla" in report.versions
    assert {row.dtype for row in report.rows} >= {"float32", "bfloat16", "float16"}
    assert "float64" not in {row.dtype for row in report.rows}  # Neuron has none
    section = (DOCS / "correctness.md").read_text().partition("## neuron, tp2\n")[2]
    assert "XLA:CPU in one process, **not on Neuron hardware**" in section.partition("|")[0]


def test_what_is_wrong_is_shown(tmp_path: Path) -> None:
    report = Report.from_json(STORED[0].read_text())
    report.rows[-1] = replace(report.rows[-1], wrong=["far off"], error=1.0)
    (tmp_path / "bad.json").write_text(report.to_json())
    text = page(tmp_path)
    assert "1 results are wrong." in text
    assert text.count("**wrong**") == 1
