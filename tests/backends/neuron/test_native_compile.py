"""torch.compile and traced models on the stand-in for Neuron: graphs that its compiler takes, and the same values."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.rank_pool import RankPool
from helpers.stand_in import CLOSE, UNDER, as_after_init, counted, ranks_on_the_stand_in  # noqa: F401  the fixture
from torch import Tensor, nn
from typer.testing import CliRunner

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.cli.app import app
from tpcore.comm.comm import Comm
from tpcore.layers import move_model_to_device
from tpcore.testing.kit.programs import traced_program
from tpcore_neuron import NativeBackend, platform
from tpcore_neuron.stand_in.device import install

pytestmark = pytest.mark.xdist_group("native")
TWO = Mesh({"dp": 1, "tp": 2})
HIDDEN, HEADS, VOCAB = 16, 4, 12


class Block(nn.Module):
    """A transformer block between an embedding and a loss."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        spread = {"sequence_dim": 1 if tokens else None}
        self.embed = tpcore.ParallelEmbedding(VOCAB, HIDDEN, **spread)
        self.norm = tpcore.RMSNorm(HIDDEN, sequence_parallel=tokens)
        self.qkv = tpcore.ParallelQKV(HIDDEN, HEADS, 1, fused=True, bias=True, **spread)
        self.out = tpcore.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, **spread)
        self.head = tpcore.ColumnParallelLinear(HIDDEN, VOCAB, gather_output=False, **spread)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids)
        parts = [t.unflatten(-1, (-1, self.qkv.head_dim)).transpose(1, 2) for t in self.qkv(self.norm(x))]
        y = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return tpcore.parallel_cross_entropy(self.head(x), target, 0.1).mean()


def step(run: Any, model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


def alike(ctx: ParallelContext, tokens: bool) -> tuple[set[str], dict[str, int]]:
    """The collectives of the graphs of steps that equal eager ones."""
    refused = counted(ctx)
    install().programs.clear()
    torch.manual_seed(0)
    model = move_model_to_device(Block(tokens), ctx.device)
    compiled = torch.compile(model, backend="neuron", fullgraph=True, dynamic=False)
    for ids in torch.randint(VOCAB, (2, 2, 9)).to(ctx.device):
        torch.testing.assert_close(step(compiled, model, ids), step(model, model, ids), **CLOSE)
    assert [*install().programs.values()] == [2, 2]  # forward and backward, each compiled once
    return {info.collectives for info in install().programs}, dict(refused)


@pytest.mark.slow
def test_a_compiled_block_equals_the_eager_one_and_nothing_is_refused(ranks: RankPool) -> None:
    for tokens in (False, True):
        for found, refused in ranks.run(TWO, as_after_init, alike, tokens, timeout=300, **UNDER):
            assert refused == {}
            assert ("reduce_scatter_tensor" in " ".join(found)) == tokens
            assert len(found) == 2


def refused_graphs(ctx: ParallelContext) -> dict[str, str]:
    """What graphs end in that the compiler does not take; the second is that of a backend which asks for no
    functional collectives."""
    backend, x, found = ctx.backend, torch.ones(4, 4).to(ctx.device), {}
    backend.capabilities = replace(backend.capabilities, functional=False)  # type: ignore[misc]
    unmended: Comm = backend.comm(ctx.comm("tp").group, ctx.rank)
    runs: dict[str, Any] = {
        "dynamic": torch.compile(torch.cos, backend="neuron", dynamic=True),
        "graph_operators": torch.compile(unmended.all_reduce, backend="neuron", fullgraph=True),
    }
    for name, run in runs.items():
        install().limits.refused.clear()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as wrong:
            run(x)
        found[name] = str(wrong.value)
        assert install().limits.refused == {name: 1}
    return found


def test_dynamic_sizes_and_operators_of_others_are_refused_in_graphs(ranks: RankPool) -> None:
    for found in ranks.run(TWO, as_after_init, refused_graphs, timeout=300, **UNDER):
        assert "refuses dynamic sizes in a compiled graph: s" in found["dynamic"]
        assert (
            "operators in a compiled graph that are not torch's own: tpcore.all_reduce.default"
            in found["graph_operators"]
        )


def of_nothing(ctx: ParallelContext) -> dict[str, int]:
    """What is refused of a graph whose collectives have no elements, or whole numbers that float32 rounds."""
    refused, comm = counted(ctx), ctx.comm("tp")

    def run(x: Tensor, whole: Tensor) -> list[Tensor]:
        x = x[:0]
        moved = [comm.all_gather(x, 1), comm.reduce_scatter(x, 1), comm.all_to_all(x, 1, 1)]
        sums = [comm.all_reduce(x), comm.all_reduce(x, "max"), comm.all_reduce(whole), comm.reduce_scatter(whole, 0)]
        return [*moved, *sums]

    x, whole = torch.ones(4, 4).to(ctx.device), torch.full((4,), 2**25 + 1).to(ctx.device)
    found = torch.compile(run, backend="neuron", fullgraph=True)(x, whole)
    assert all(torch.equal(y.cpu(), eager.cpu()) for y, eager in zip(found, run(x, whole), strict=True))
    return dict(refused)


def test_nothing_is_sent_of_no_elements_in_a_graph_and_whole_numbers_are_exact(ranks: RankPool) -> None:
    mesh = Mesh({"dp": 1, "tp": 4})  # whose all-to-all is not refused
    assert ranks.run(mesh, as_after_init, of_nothing, timeout=300, **UNDER) == [{}] * 4


def served(ctx: ParallelContext) -> tuple[list[str], dict[str, int]]:
    """The kit's checks of a traced model."""
    refused = counted(ctx)
    return list(traced_program(ctx)), dict(refused)


def test_a_traced_model_computes_what_the_plain_one_does(ranks: RankPool) -> None:
    assert ranks.run(TWO, as_after_init, served, timeout=300, **UNDER) == [([], {})] * 2


SCRIPT = """
import torch
import tpcore

ctx = tpcore.init(backend="neuron", tp=2)
layer = tpcore.RowParallelLinear(8, 6, input_is_parallel=True)
run = torch.compile(tpcore.layers.move_model_to_device(layer, ctx.device), backend="neuron", fullgraph=True)
for step in range(3):
    run(torch.ones(4, 4).to(ctx.device)).sum().backward()
tpcore.shutdown()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_scripts_graphs_are_listed_and_given_to_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    script, given = str(tmp_path / "train.py"), list[Any]()
    command = ["torchrun", "--nproc_per_node=2", script]
    forward, backward = NativeBackend.compile_ahead(command, None)
    assert (forward.runs, backward.runs) == (3, 3)
    assert (forward.collectives, backward.collectives) == ("1 all_reduce", "")
    assert forward.site == f"{script}:9 in <module>"
    # where AWS's package is, the job runs once more, as a compiler alone and not on the stand-in
    monkeypatch.setattr(platform, "installed", lambda name: "2.14.3")

    def run(words: list[str], check: bool, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        given.append((words, env))
        return subprocess.CompletedProcess(words, len(given) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("TPCORE_NEURON_LIMITS", "2.33")
    NativeBackend.compile_ahead(command, None)
    ((words, env),) = given
    assert words[1:] == ["-m", "torch.distributed.run", "--nproc_per_node=2", script]
    assert (env["TORCH_NEURONX_COMPILE_ONLY"], env["NEURON_PLATFORM_TARGET_OVERRIDE"]) == ("1", "trn2")
    assert "TPCORE_NEURON_LIMITS" not in env
    found = CliRunner().invoke(app, ["compile", "--", *command])
    assert (found.exit_code, found.exc_info[0]) == (2, SystemExit)
    assert f"nproc_per_node=2 {script} exited with status 1: what it printed has the reason" in found.output


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("wrong", "said"), [("1 / 0", "fails at line 2: ZeroDivisionError"), ("exit(3)", "status 3")])
def test_a_script_that_fails_is_one_line(tmp_path: Path, monkeypatch: Any, wrong: str, said: str) -> None:
    (tmp_path / "train.py").write_text(f"import tpcore\n{wrong}")
    monkeypatch.setenv("TPCORE_NEURON_LIMITS", "2.33")
    found = CliRunner().invoke(app, ["compile", "--", "python", str(tmp_path / "train.py")])
    assert found.exit_code == 2
    (line,) = [line for line in found.output.splitlines() if line.startswith("tpcore compile:")]
    assert said in line
    assert "Traceback" not in found.output
