"""parallel_model_trace from a program: what happens in its processes is told, and nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import programs as forked
from models import Encoder, batch
from torch import nn

import tpcore
from tpcore import trace
from tpcore.backend.registry import backend_class
from tpcore.errors import BackendError
from tpcore.processes.transfer import RankTraceback

pytestmark = pytest.mark.usefixtures("default_checks")

SCRIPT = """
import json, torch, tpcore
from tpcore import trace
from torch import nn

size = 8

class Head(nn.Module):                       # a class of the script's own, not behind a main guard
    def __init__(self, bias):
        super().__init__()
        self.layer = tpcore.ColumnParallelLinear(size, 4)
        self.bias = bias

    def forward(self, x):
        return (self.layer(x) + self.bias,)

def outer(bias):
    def get_model():
        torch.manual_seed(0)
        return Head(bias), {}
    return get_model

x = torch.ones(2, size)
trace.parallel_model_save(trace.parallel_model_trace(outer(3.0), x, tp_degree=2), "traced")
model = trace.parallel_model_load("traced")
torch.manual_seed(0)
plain = nn.Linear(size, 4)
print(json.dumps([(model(x)[0] - plain(x) - 3.0).abs().max().item(), model.tp_degree]))
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "TPCORE_BACKEND": "cpu_gloo", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=forked.PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    difference, tp = json.loads(done.stdout)
    assert difference < 1e-6  # float32
    assert tp == 2
    said = done.stderr.splitlines()
    for rank in (0, 1):
        steps = [line.rpartition(": ")[2] for line in said if f"trace: rank {rank} of 2" in line]
        assert steps == ["building the model", "tracing", "writing weights"]
    assert left(tmp_path) == ["script.py", "traced"]


def left(folder: Path) -> list[str]:
    """What is in a folder, without the cache that torch makes for itself."""
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("torchinductor"))


def _fails() -> nn.Module:
    if tpcore.current().rank == 1:
        raise LookupError("no such weights")
    return Encoder(True)


@pytest.mark.processes
def test_what_goes_wrong_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(LookupError, match="no such weights") as caught:
        trace.parallel_model_trace(_fails, batch(1, 8), tp_degree=2, backend="cpu_gloo")
    cause = caught.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert "rank 1:" in str(cause)
    assert "in _fails" in str(cause)
    assert list(tmp_path.iterdir()) == []


X = torch.ones(1)


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes end as those of any ``tpcore.launch`` do."""

    def interrupted(*_: Any, **__: Any) -> None:
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("tpcore.trace.api.launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trace.parallel_model_trace(nn.Identity, X, 1, backend="cpu_gloo")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X, 0), {}, ValueError, "tp_degree must be a whole number of ranks, 1 or more, not 0"),
        ((X, True), {}, ValueError, "not True"),
        ((X, "2"), {}, ValueError, "not '2'"),
        ((X, 1_000_000), {}, ValueError, r"tp_degree=1000000: this machine can hold \d+ ranks of backend 'cpu"),
        (("x",), {}, TypeError, "inputs must be a tensor, a tuple, a list or a dict, not a str"),
        ((X,), {"dynamic_shapes": {}, "bucket_inputs": [X]}, ValueError, "give one"),
        ((X,), {"backend": "nope"}, BackendError, "no backend 'nope' is installed"),
    ],
)
def test_arguments(args: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trace.parallel_model_trace(nn.Identity, *args, **{"backend": "cpu_gloo", **options})


def test_dynamic_shapes_are_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_class("cpu_gloo")
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, dynamic_shapes=False))
    monkeypatch.setattr("tpcore.trace.api.launch", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(BackendError, match=r"'cpu_gloo' has programs of fixed sizes only.*bucket_inputs"):
        trace.parallel_model_trace(nn.Identity, X, 1, backend="cpu_gloo", dynamic_shapes={"input": {0: "n"}})
