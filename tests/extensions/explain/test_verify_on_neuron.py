"""``tpcore verify`` on the stand-in for Neuron, a device of 32 bits with tensors of a class of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.rank_pool import RankPool
from helpers.stand_in import UNDER, counted, ranks_on_the_stand_in  # noqa: F401  the fixture
from test_verify_model import folder_of

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore_explain.verify.model import ModelVerdict, compared
from tpcore_explain.verify.report import checked, edge_rows
from tpcore_explain.verify.script.run import ScriptError, verify_script

pytestmark = pytest.mark.xdist_group("native")

SCRIPT = """
import sys
import torch
import tpcore

ctx = tpcore.init(backend="neuron", tp=2)
torch.manual_seed(0)
up = tpcore.ColumnParallelLinear(8, 16, gather_output=False)
down = tpcore.RowParallelLinear(16, 4, input_is_parallel=True)
net = tpcore.layers.move_model_to_device(torch.nn.Sequential(tpcore.RMSNorm(8), up, torch.nn.ReLU(), down), ctx.device)
if "larger" in sys.argv and ctx.world.size > 1:
    down.register_forward_hook(lambda module, args, out: out * 1.001)
optimizer = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
for step in range(3):
    torch.manual_seed(step)
    optimizer.zero_grad()
    net(torch.randn(8, 8).to(ctx.device)).square().mean().backward()
    tpcore.optimizer_step(optimizer)
tpcore.shutdown()
"""


def of_model(ctx: ParallelContext, folder: str, options: dict[str, Any]) -> tuple[ModelVerdict, dict[str, int]]:
    refused = counted(ctx)
    return compared(ctx, folder, options), dict(refused)


MODELS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt2", {"tp": 2}, {}),  # whose embedding and head are tied
    ("mixtral", {"tp": 2}, {"sequence_parallel": True}),
    ("mixtral", {"ep": 2, "tp": 2}, {"expert_parallel": True, "dispatch": "all_to_all"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "axes", "options"), MODELS)
def test_a_right_model_is_told_so_in_float32(
    ranks: RankPool, tmp_path: Path, kind: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    mesh = Mesh({"dp": 1, **axes})
    for found, refused in ranks.run(mesh, of_model, folder_of(kind, tmp_path), options, **UNDER):
        assert (found.wrong, found.refused, refused) == (None, None, {})
        assert "parameters in float32, " in found.lines[0]


def edges(ctx: ParallelContext) -> list[str]:
    return [message for row in edge_rows(ctx, ["test_any_call"]) for message in row.wrong]


@pytest.mark.slow
def test_tensors_that_lie_anywhere_in_memory_are_sent_as_they_are(ranks: RankPool) -> None:
    """Lazily conjugated and negated ones too."""
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), edges, **UNDER) == [[]] * 2


def whole(ctx: ParallelContext) -> list[str]:
    return checked(ctx, "neuron").wrong


@pytest.mark.drill
def test_verify_finds_nothing_wrong(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), whole, timeout=300.0, **UNDER) == [[]] * 2


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_is_compared_in_its_own_types(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT)
    found = verify_script(script, **UNDER)
    assert found.first is None
    assert found.parts > 0  # modules have been looked into
    larger = verify_script(script, ["larger"], dtype="own", **UNDER).first
    assert larger is not None
    assert (larger.module, larger.direction) == ("model.3", "forward")
    with pytest.raises(ScriptError, match="trains on a device without float64: --dtype own or bits"):
        verify_script(script, dtype="float64", **UNDER)
    assert not tpcore.is_initialized()
