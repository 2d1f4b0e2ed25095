"""The demo's verdict: curves that agree pass, curves that do not end it with an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import demo


def run(tp, offset=0.0, steps=20):
    record = {"nsp_loss": 0.7, "grad_norm": 1.0, "lr": 1e-3, "sequences_per_second": 100.0}
    metrics = []
    for step in range(1, steps + 1):
        mlm = 7.6 - 0.1 * step + (offset if step == 13 else 0.0)
        metrics.append({"step": step, "loss": mlm + 0.7, "mlm_loss": mlm, **record})
    return demo.Run(tp, {"parameters_per_rank": 1_000_000 // tp}, metrics, seconds=3.2)


def test_curves_that_agree(tmp_path, capsys):
    demo.report([run(1), run(2, offset=1e-5)], tmp_path)
    out = capsys.readouterr().out
    assert "1.0e-05 at step 13, limit 0.001" in out
    assert "1,000,000" in out
    assert "500,000" in out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("offset", [2e-3, -0.5, float("nan")])
def test_curves_that_disagree(offset, tmp_path):
    with pytest.raises(SystemExit, match="FAILED: the loss curves disagree by"):
        demo.report([run(1), run(2, offset=offset)], tmp_path)
    assert (tmp_path / "loss.png").exists()  # to look at


def test_runs_of_different_length(tmp_path):
    with pytest.raises(SystemExit, match="20 and 19 steps"):
        demo.report([run(1), run(2, steps=19)], tmp_path)


def test_a_run_that_fails_ends_the_demo(tmp_path, monkeypatch):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(demo, "PRETRAIN", script)
    with pytest.raises(SystemExit, match="tp=1 failed with exit code 3"):
        demo.train(1, tmp_path / "tp1", steps=10)


def test_serving_that_fails_ends_the_demo(tmp_path, monkeypatch):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(4)")
    monkeypatch.setattr(demo, "FILL", script)
    with pytest.raises(SystemExit, match="serving failed with exit code 4"):
        demo.fill_in(2, tmp_path / "tp2")
