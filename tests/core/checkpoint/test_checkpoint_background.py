"""Saves in the background, by all dp ranks, and of which only the last are kept."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import programs as forked
from helpers.worlds import each_rank
from tqdm import tqdm

import tpcore
from tpcore.checkpoint import load, save, wait
from tpcore.checkpoint.write import background
from tpcore.checkpoint.write import save as writing
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_fsync")

MESH = Mesh({"dp": 2, "tp": 2})


def test_values_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while nothing is written yet; one save is under way at a time."""
    go = threading.Event()
    real = writing.write_tensors

    def held(*args: Any) -> Any:
        assert go.wait(60)
        return real(*args)

    monkeypatch.setattr(writing, "write_tensors", held)

    def one(ctx: ParallelContext) -> None:
        w = torch.ones(3)
        save({"model": {"w": w}, "n": 1}, tmp_path / "1", background=True)
        w.zero_()
        assert not (tmp_path / "1").exists()
        ctx.world.all_gather(torch.zeros(1), 0)  # training's collectives meet none of the save's
        go.set()
        save({"model": {"w": w}, "n": 2}, tmp_path / "2", background=True)
        assert (tmp_path / "1").exists()
        found = load(tmp_path / "2")  # waits for it
        assert (found["n"], float(found["model"]["w"].sum())) == (2, 0.0)
        found = load(tmp_path / "1")
        assert (found["n"], float(found["model"]["w"].sum())) == (1, 3.0)
        wait()

    run_ranks(MESH, one)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.mark.parametrize(("failing", "background"), [(0, True), (1, True), (1, False)])
def test_an_error_comes_on_all_ranks(
    failing: int, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a file, at the next call if it is in the background; the previous checkpoint stays."""
    run_ranks(MESH, lambda ctx: save({"n": 1}, tmp_path / "c"))
    real = writing.write_tensors

    def full(file: str, *args: Any) -> Any:
        if f"tp_rank_{failing}/" in file:
            raise OSError(28, "No space left on device")
        return real(file, *args)

    def one(ctx: ParallelContext) -> str:
        if background:
            save({"model": {"w": torch.ones(3)}}, tmp_path / "c", background=True)
        with pytest.raises(CheckpointError) as caught:
            wait() if background else save({"model": {"w": torch.ones(3)}}, tmp_path / "c")
        wait()  # it was told once
        return str(caught.value)

    monkeypatch.setattr(writing, "write_tensors", full)
    messages = run_ranks(MESH, one)
    assert all("No space left on device" in m and str(tmp_path / "c") in m for m in messages)
    assert os.listdir(tmp_path) == ["c"]
    assert run_ranks(MESH, lambda ctx: load(tmp_path / "c")) == [{"n": 1}] * 4


def test_an_error_shows_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also, a program that ends at once still has its checkpoint."""
    monkeypatch.delenv("TPCORE_CHECK", raising=False)  # checked runs import the compiler first
    program = """if True:
        import sys, torch, tpcore
        from tpcore.checkpoint import save
        from tpcore.checkpoint.write import save as writing
        tpcore.init(backend="cpu_gloo")
        if sys.argv[2] == "fail":
            def full(*args): raise OSError(28, "No space left on device")
            writing.write_tensors = full
        save({"model": {"w": torch.ones(3)}}, sys.argv[1], background=True)
    """
    for how in ("fail", "pass"):
        words = [sys.executable, "-c", program, str(tmp_path / how), how]
        done = subprocess.run(words, capture_output=True, text=True, timeout=forked.PATIENCE, check=False)
        assert done.returncode == (how == "fail")
        assert ("No space left on device" in done.stderr) == (how == "fail"), done.stderr
    assert os.listdir(tmp_path) == ["pass"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bar on a terminal, of a load too, and a line in the log before and after."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(tqdm, "__init__", partialmethod(tqdm.__init__, mininterval=0))  # each step is drawn

    def one(ctx: ParallelContext) -> None:
        model = torch.nn.Linear(1000, 1, bias=False)
        optimizer = tpcore.Zero1(torch.optim.SGD, model.named_parameters(), momentum=0.9)
        model(torch.ones(1000)).backward()
        optimizer.step()
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "also": torch.ones(2000)}
        save(parts, tmp_path / "c", background=True)
        load(tmp_path / "c", model, optimizer=optimizer)

    with caplog.at_level(logging.INFO, "tpcore.checkpoint"):
        run_ranks(MESH, one)
    first, last = (record.getMessage() for record in caplog.records)
    assert first == f"saving {tmp_path / 'c'}"
    assert last.startswith(f"saved {tmp_path / 'c'} in ")
    bars = re.findall(r"(\w+): +(\d+)%[^\r]* [\d.k]+/([\d.]+k) ", shown.getvalue())
    assert [(title, of) for title, done, of in bars if done == "0"] == [
        ("saving", "16.0k"),
        ("checking", "4.00k"),  # the model
        ("checking", "4.00k"),  # this rank's share of the optimizer's tensors
        ("loading", "8.00k"),
        ("loading", "2.00k"),
        ("loading", "4.00k"),
    ]
    assert [title for title, done, _ in bars if done == "100"] == [title for title, done, _ in bars if done == "0"]


def test_a_rank_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 does not wait for it for ever, and all ranks that are left hear of it."""
    monkeypatch.setattr(background, "_PATIENCE", 0.2)
    real, go = writing.write_tensors, threading.Event()

    def silent(file: str, *args: Any) -> Any:
        if "tp_rank_1/" in file:
            assert go.wait(60)
        return real(file, *args)

    monkeypatch.setattr(writing, "write_tensors", silent)

    def one(ctx: ParallelContext) -> str:
        save({"model": {"w": torch.ones(3)}}, tmp_path / "c", background=True)
        if ctx.rank == 0:
            background._under_way[id(ctx)][1].join()
            go.set()
        with pytest.raises(CheckpointError) as caught:
            wait()
        return str(caught.value)

    messages = run_ranks(Mesh({"tp": 2}), one)
    assert "rank 1 has written 0 bytes, and nothing for 0 s" in messages[0]
    assert os.listdir(tmp_path) == []


@each_rank(tp=2)
def test_ranks_that_save_in_different_ways_all_say_so(ctx: ParallelContext, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank 0 with background=False.* rank 1 with background=True"):
        save({"model": {"w": torch.ones(3)}}, tmp_path / "c", background=ctx.rank == 1)
    assert os.listdir(tmp_path) == []


def test_every_dp_rank_writes_a_share(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((i + 1, 4), float(i)) for i in range(6)}

    def one(ctx: ParallelContext) -> None:
        model = tpcore.ColumnParallelLinear(4, 8)
        for p in model.parameters():
            torch.nn.init.constant_(p, 7.0)
        tied = {**state, "again": state["w3"]}
        save({"model": model.state_dict(), "more": tied}, tmp_path / "c", share_writes=True)
        found = load(tmp_path / "c", tpcore.ColumnParallelLinear(4, 8))
        assert all(torch.equal(found["more"][name], t) for name, t in state.items())
        assert found["more"]["again"] is found["more"]["w3"]

    run_ranks(MESH, one)
    files = json.loads((tmp_path / "c" / "manifest.json").read_text())["files"]
    by_dp = [sum(f["bytes"] for p, f in files.items() if f".dp{d}." in p) for d in range(2)]
    assert min(by_dp) > 0.4 * max(by_dp)
    for tp in (1, 4):
        run_ranks(Mesh({"tp": tp}), lambda ctx: load(tmp_path / "c", tpcore.ColumnParallelLinear(4, 8)))


def test_keep_last(tmp_path: Path) -> None:
    """Of what is called alike and is a checkpoint; never what is newer, or something else."""
    for name in ("step_0", "other_1", "step_x"):
        (tmp_path / name).mkdir()

    def one(ctx: ParallelContext) -> None:
        for step in (8, 9, 30, 10, 11):
            save({"n": step}, tmp_path / f"step_{step}", keep_last=2)

    run_ranks(MESH, one)
    kept = {"step_0", "other_1", "step_x", "step_10", "step_11", "step_30"}
    assert set(os.listdir(tmp_path)) == kept


@pytest.mark.parametrize("manifest", ['{"my": "web app"}', '{"format": "tpcore.trace", "version": 1}', "{", "[]"])
def test_keep_last_removes_no_directory_of_another_program(tmp_path: Path, manifest: str) -> None:
    """Nor a traced model, nor a checkpoint whose manifest is damaged."""
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1/manifest.json").write_text(manifest)
    (tmp_path / "step_1/precious.txt").write_text("x")
    for step in (2, 3):
        run_ranks(MESH, lambda ctx: save({"n": 0}, tmp_path / f"step_{step}", keep_last=1))  # noqa: B023
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_3"]
    assert sorted(os.listdir(tmp_path / "step_1")) == ["manifest.json", "precious.txt"]
