"""What processes leave on the disk that are killed: the next one of their kind removes or finishes it."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import programs as forked
from torch import nn

import tpcore
from tpcore.checkpoint import load, save
from tpcore.checkpoint.storage.publish import OwnedDirectory
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

KILLED = """
import os, signal, sys, tempfile, time

def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)
"""
SAVE = """
import torch, tpcore
tpcore.init("cpu_gloo", tp=1)
os.fsync = killed
tpcore.checkpoint.save({"w": torch.ones(3)}, sys.argv[1])
"""
OWNS = """
from tpcore.checkpoint.storage.publish import OwnedDirectory
tempfile.tempdir = sys.argv[1]
folder = OwnedDirectory("tpcore-test-")
open(os.path.join(folder.name, "weights"), "wb").write(b"x")
killed()
"""


def die(folder: Path, program: str, *args: Path) -> None:
    (folder / "program.py").write_text(KILLED + program)
    done = forked.run(["python", "program.py", *map(str, args)], folder)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    home = tmp_path / "home"
    home.mkdir()
    return home


def one(path: Path, step: int) -> None:
    def rank(ctx: ParallelContext) -> None:
        model = nn.ModuleList([tpcore.ColumnParallelLinear(3, 4)])
        save({"model": model.state_dict(), "step": step}, path)

    run_ranks(Mesh({"tp": 1}), rank)


@pytest.mark.processes
def test_a_save_to_a_name_that_is_not_saved_to_again(home: Path, tmp_path: Path) -> None:
    die(tmp_path, SAVE, home / "step_13")
    assert any(name.startswith(".step_13.saving-") for name in os.listdir(home))
    one(home / "best", 1)  # of another name
    assert len(os.listdir(home)) == 3
    one(home / "step_20", 20)
    assert sorted(os.listdir(home)) == ["best", "step_20"]


def test_what_another_job_writes_stays(home: Path) -> None:
    with open(home / ".step_13.lock", "wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        (home / ".step_13.saving-other").mkdir()
        one(home / "step_20", 20)
        assert sorted(os.listdir(home)) == [".step_13.lock", ".step_13.saving-other", "step_20"]


def test_the_instant_between_two_renames_of_another_number(home: Path) -> None:
    """The new checkpoint is whole, and gets its name."""
    one(home / "13", 13)
    one(home / "14", 14)
    (home / "13").rename(home / ".step_13.replaced-abc")
    (home / "14").rename(home / ".step_13.saving-abc")
    one(home / "step_20", 20)
    assert sorted(os.listdir(home)) == ["step_13", "step_20"]
    run_ranks(Mesh({"tp": 1}), lambda ctx: torch.testing.assert_close(load(home / "step_13")["step"], 14))


@pytest.mark.processes
def test_a_temporary_directory_goes_with_the_next_of_its_kind(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(home))
    die(tmp_path, OWNS, home)
    (left,) = os.listdir(home)
    (home / "tpcore-test-of-nobody").mkdir()
    with OwnedDirectory("tpcore-other-"):
        assert left in os.listdir(home)
    with OwnedDirectory("tpcore-test-") as first, OwnedDirectory("tpcore-test-") as second:
        assert {home / name for name in os.listdir(home)} == {Path(first), Path(second), home / "tpcore-test-of-nobody"}
    assert os.listdir(home) == ["tpcore-test-of-nobody"]
