"""``tpcore compile``: the distinct programs of a script, found without a device."""

from __future__ import annotations

import json
import os
import sys

import pytest
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from tpcore.cli.app import app

SCRIPT = """
import sys
import torch
import tpcore

ctx = tpcore.init(backend="neuron", tp=2)
torch.manual_seed(0)
layer = tpcore.RowParallelLinear(8, int(sys.argv[1]), input_is_parallel=True).to(ctx.device)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
for step in range(3):
    layer(torch.full((4, 4), 0.5 + step).to(ctx.device)).sum().backward()
    tpcore.optimizer_step(optimizer, max_norm=1.0)
    optimizer.zero_grad()
tpcore.shutdown()
if __name__ != "__main__":
    sys.exit("not run as a script")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compile", *words], catch_exceptions=False)
    return done.exit_code, done.output


def test_each_distinct_program_is_listed(script):
    status, text = run("--json", "--", "torchrun", "--nproc_per_node=2", script, "6")
    assert status == 0
    first, step = (p for p in json.loads(text) if p["collectives"])
    assert (first["runs"], step["runs"]) == (1, 2)  # the number of the step is not in the program
    # the sum of the outputs is used by nobody, so only the norm's all-reduce is left of the collectives
    assert step["collectives"] == "1 all_reduce add over 2"
    assert step["site"].startswith(script)
    # at least the rank's 6 x 4 weights, 6 biases and 4 x 4 inputs, of 4 bytes
    assert step["parameter_bytes"] >= 4 * (24 + 6 + 16)


def test_where_the_neuron_tools_are_they_run_the_script_too(script, tmp_path, monkeypatch):
    """The stand-in takes what ``neuron_parallel_compile`` is documented to take: a command, which it runs."""
    tool, said = tmp_path / "bin/neuron_parallel_compile", tmp_path / "said"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    status, _ = run("--nprocs", "2", "--", "python", script, "6")
    assert status == 0
    command = said.read_text().splitlines()
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    parsed = get_args_parser().parse_args(command[3:])
    assert (parsed.nproc_per_node, parsed.training_script) == ("2", script)
    assert parsed.training_script_args == ["6"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./train.sh"], "cannot compile ./train.sh"),
        (["python", "no_such_script.py"], "there is no script no_such_script.py"),
        (["python", "-m", "no_such_module"], "there is no module no_such_module"),
    ],
)
def test_what_cannot_be_compiled_is_said(words, said):
    status, text = run("--nprocs", "2", "--", *words)
    assert status == 2
    assert said in " ".join(text.split())
