"""``tpcore verify train.py`` on processes, of a script that knows nothing of tpcore."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import programs as forked
from test_launched import environment

pytestmark = [
    *(pytest.mark.slow, pytest.mark.xdist_group("launched"), pytest.mark.processes),
    pytest.mark.usefixtures("default_checks"),
]

SCRIPT = """
import sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
layers = nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 4)
net = nn.Sequential(*layers)
parallelize_module(net, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
if "lost" in sys.argv and mesh.size() > 1:
    net[3]._forward_hooks.clear()
    net[3].register_forward_hook(lambda module, args, out: out.to_local())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
for step in range(3):
    torch.manual_seed(step)
    optimizer.zero_grad()
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
"""


def test_a_script_of_dtensor_is_equal_and_a_sum_left_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["tpcore", "verify", "train.py", "--save", "out.json"]
    done = forked.run(words, tmp_path, environment(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("equal: 2 ranks compute what one process does")
    done = forked.run([*words, "lost"], tmp_path, environment(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    first = json.loads((tmp_path / "out.json").read_text())["first"]
    assert (first["module"], first["direction"], first["ranks"]) == ("model.3", "forward", [0, 1])
    assert first["cause"].startswith("partial sums not reduced")


def test_without_anything_to_compare_it_says_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    for more, why in (([], "calls no module"), (["--dtype", "int8"], "--dtype takes float64, own, bits")):
        done = forked.run(["tpcore", "verify", "train.py", *more], tmp_path, environment(tmp_path))
        assert done.returncode == 2, done.stdout + done.stderr
        assert why in done.stderr
