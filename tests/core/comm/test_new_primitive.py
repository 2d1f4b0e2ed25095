"""A new primitive is an entry of the table, a default and a method of Comm: two files, and all else follows.

The edits are made to a copy of the source, and a process of its own imports that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.places import ROOT

ENTRY = """
REVERSE = Primitive(
    "reverse",
    {},
    "reverse".format,
    meaning=lambda every, me: every[len(every) - 1 - me],
    sent=lambda nbytes, n: nbytes,
    transpose=lambda comm, y: comm.reverse(y),
)
TABLE = (REVERSE, ALL_GATHER,"""
DEFAULT = """
    def reverse(self, x: Tensor) -> Tensor:
        return self.permute(x, tuple(reversed(range(self.size))))

    def broadcast("""
METHOD = """
    def reverse(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else self.transport.reverse(x)

    def broadcast("""
PROGRAM = """
import tempfile
from pathlib import Path

import torch
from torch import nn
from tpcore_cpu_gloo import programs

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.kit import collectives, training

assert "reverse" in collectives.PRIMITIVES and "reverse" in collectives.MOVING
two = Mesh({"tp": 2})


def kit(ctx):
    return collectives.right_values(ctx, "reverse", torch.float32) + training.primitive_law(ctx, "reverse")


assert run_ranks(Mesh({"tp": 4}), kit) == [[]] * 4


class Reversing(nn.Module):
    def __init__(self):
        super().__init__()
        self.tp, self.weight = tpcore.current().comm("tp"), nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.tp.reverse(x) + self.weight - 1


folder = Path(tempfile.mkdtemp())


def traced(ctx):
    model, x = Reversing(), torch.full((2, 3), ctx.rank + 1.0)

    def run(weights, inputs):
        return [torch.func.functional_call(model, dict(weights), tuple(inputs))]

    weights = dict(model.state_dict())
    programs.trace(run, weights, [x], [{}], ctx.comms, ctx.world, folder)
    ctx.world.all_reduce(torch.ones(1))
    program = programs.load(folder, weights, ctx.named)
    return program([x])[0].unique().tolist()


assert run_ranks(two, traced) == [[2.0], [1.0]]
assert "tpcore::reverse" in (folder / "graph.json").read_text()
"""


def edited(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1, before
    path.write_text(text.replace(before, after))


def run_with_a_new_primitive(tmp_path: Path, program: str) -> None:
    shutil.copytree(ROOT / "tpcore", tmp_path / "tpcore")
    shutil.copytree(ROOT / "backends/cpu_gloo/tpcore_cpu_gloo", tmp_path / "tpcore_cpu_gloo")
    edited(tmp_path / "tpcore/comm/transport.py", "\nTABLE = (ALL_GATHER,", ENTRY)
    edited(tmp_path / "tpcore/comm/transport.py", "\n    def broadcast(", DEFAULT)
    edited(tmp_path / "tpcore/comm/comm.py", "\n    def broadcast(", METHOD)
    (tmp_path / "program.py").write_text(program)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_files_make_a_primitive(tmp_path: Path) -> None:
    run_with_a_new_primitive(tmp_path, PROGRAM)
