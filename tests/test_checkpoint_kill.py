"""A saving process is killed at each of its steps on the file system, by SIGKILL, one process a step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tpcore.checkpoint import load, save
from tpcore.context import ParallelContext
from tpcore.errors import CheckpointError
from tpcore.mesh import Mesh
from tpcore.testing import run_ranks

# A fork server, which has imported torch and started nothing: each save is a child of it, and kills itself at
# the step it is told. Steps are what an audit hook sees (open, mkdir, rename, remove,
# rmtree, flock, ctypes' call of renameat2) and what has no audit event: fsync and write.
SAVER = r"""
import os, signal, sys
import torch
import tpcore
from tpcore import checkpoint
from tpcore.checkpoint import files, staging

home, two_renames, async_save = sys.argv[1], sys.argv[2] == "two renames", sys.argv[2] == "async"
torch.set_num_threads(1)
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock", "ctypes.dlsym")

def save(stop):
    steps = [0]
    def step():
        steps[0] += 1
        if steps[0] == stop:
            os.kill(os.getpid(), signal.SIGKILL)
    def hook(event, args):
        if event in EVENTS and (event != "open" or home in str(args[0])):
            step()
    sys.addaudithook(hook)
    real = open
    os.fsync = lambda fd: step()
    def opened(path, mode):
        f = real(path, mode)
        if "b" in mode and "x" in mode:
            f = Counted(f, step)
        return f
    files.open = opened
    exchange = staging._exchange
    staging._exchange = (lambda a, b: False) if two_renames else lambda a, b: (step(), exchange(a, b))[1]
    checkpoint.save({"model": {"w": torch.full((3,), 2.0)}, "more": {"v": torch.tensor([2])}, "n": 2},
                    os.path.join(home, "c"), async_save=async_save)
    checkpoint.wait()
    return steps[0]

class Counted:
    def __init__(self, f, step): self._f, self._step = f, step
    def write(self, data):
        half = len(data) // 2
        self._f.write(data[:half]); self._f.flush()
        self._step()
        return half + self._f.write(data[half:])
    def __enter__(self): return self
    def __exit__(self, *error): self._f.close()
    def __getattr__(self, name): return getattr(self._f, name)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        tpcore.init(backend="cpu_gloo")
        save(int(line))
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def versions(path: Path) -> int:
    """The version that is there, all of it the same."""
    found: list[int] = []

    def read(ctx: ParallelContext) -> None:
        state = load(path)
        assert float(state["model"]["w"].sum()) == 3 * state["n"]
        assert int(state["more"]["v"]) == state["n"]
        found.append(state["n"])

    run_ranks(Mesh({"tp": 1}), read)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["first", "exchange", "two renames", "async"])
def test_killed_at_every_step(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # here, not in what is killed
    state = {"model": {"w": torch.ones(3)}, "more": {"v": torch.tensor([1])}, "n": 1}
    run_ranks(Mesh({"tp": 1}), lambda ctx: save(state, tmp_path / "old"))
    home = tmp_path / "home"
    words = [sys.executable, "-c", SAVER, str(home), how]
    seen, killed = set(), 0
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        for stop in range(1, 1000):
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            if how != "first":
                shutil.copytree(tmp_path / "old", home / "c")
            print(stop, file=saver.stdin, flush=True)
            status = int(saver.stdout.readline())
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            killed += 1
            try:
                seen.add(versions(home / "c"))
            except CheckpointError:
                assert how == "first"  # where nothing was before there may be nothing, but not half of it
                assert not (home / "c").exists()
        saver.stdin.close()
    assert versions(home / "c") == 2
    assert os.listdir(home) == ["c"]
    assert killed > 25
    assert seen == ({2} if how == "first" else {1, 2})
