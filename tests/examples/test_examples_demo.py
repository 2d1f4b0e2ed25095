"""The demos' verdicts: curves that agree pass, curves that do not end them with an error."""

from __future__ import annotations

import os
import sys

import pytest
from helpers import programs as forked
from helpers.places import ROOT

from tpcore.settings import CHECK

sys.path.insert(0, str(ROOT / "examples"))

import demo
import demo_llama


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
    with pytest.raises(SystemExit, match="20 and 19 steps"):
        demo.report([run(1), run(2, steps=19)], tmp_path)
    with pytest.raises(SystemExit, match="FAILED: the loss curves disagree by"):
        demo.report([run(1), run(2, offset=offset)], tmp_path)
    assert (tmp_path / "loss.png").exists()  # to look at


def test_a_program_that_fails_ends_the_demo(tmp_path, monkeypatch):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(demo, "PRETRAIN", script)
    with pytest.raises(SystemExit, match="tp=1 failed with exit code 3"):
        demo.train(1, tmp_path / "tp1", steps=10)
    monkeypatch.setattr(demo, "FILL", script)
    with pytest.raises(SystemExit, match="serving failed with exit code 3"):
        demo.fill_in(2, tmp_path / "tp2")


def llama_run(name, losses, tokens=(5, 6)):
    return demo_llama.Run(name, list(losses), list(tokens), 3.2)


def test_losses_of_the_llama_that_agree(tmp_path, capsys):
    demo_llama.report([llama_run("one process", [7.6, 7.1]), llama_run("tp=2", [7.6, 7.10001])], tmp_path)
    assert "loss 7.6000 -> 7.1000; largest difference between the runs 1.0e-05" in capsys.readouterr().out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("losses", "match"), [([7.6, 7.2], "disagree by 1.0e-01"), ([7.6], "2 and 1 steps, not as many")]
)
def test_losses_of_the_llama_that_disagree(losses, match, tmp_path):
    with pytest.raises(SystemExit, match=match):
        demo_llama.report([llama_run("one process", [7.6, 7.1]), llama_run("tp=2", losses)], tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_the_llama_demo_is_trained_consolidated_and_served(tmp_path):
    words = ["python", demo_llama.__file__, "--steps", "2", "--output_dir", str(tmp_path / "out")]
    done = forked.run(words, tmp_path, os.environ | {"COLUMNS": "200", CHECK.name: CHECK.default})
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [line.partition(": [")[2] for line in done.stdout.splitlines() if ": [" in line]
    assert len(answers) == 3
    assert len(set(answers)) == 1
    assert answers[0].count(",") == 11, "twelve tokens"
    for name in ("loss.png", "cut", "model/model.safetensors", "traced"):
        assert (tmp_path / "out" / name).exists()
