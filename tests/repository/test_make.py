"""The Makefile's own work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.places import ROOT

TESTS = """
from pathlib import Path
import pytest

def test_passes(): Path("passed").open("a").write("x")

@pytest.mark.xdist_group("some")
def test_fails_once():
    with Path("ran").open("a") as f: f.write("x")
    assert Path("ran").read_text() == "xx"
"""


def test_what_failed_runs_once_more_and_nothing_else(tmp_path: Path) -> None:
    """A test of a group too, whose name pytest-xdist keeps with the group's."""
    (tmp_path / "test_here.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE"))}
    probe = f"probe: ; $(call tests,cd {tmp_path} && {sys.executable},-n 2 --dist loadgroup -p no:tpcore)"
    words = ["make", "--no-print-directory", "--eval", probe, "probe", "RETRY=1"]
    done = subprocess.run(words, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text() == "xx"
    assert (tmp_path / "passed").read_text() == "x"
