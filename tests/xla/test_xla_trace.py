"""Models traced for neuron: one HLO program for all ranks, run on replicas, against the unsharded model."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.places import ROOT, TESTS
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM

import tpcore
from tpcore.backend.interface import CompilerOptions
from tpcore.trace import TensorParallelModel, parallel_model_load, parallel_model_save, parallel_model_trace
from tpcore.trace.artifact import opened, read_weights
from tpcore.trace.make.tracing import trace_rank
from tpcore.trace.serve.worker import Rank
from tpcore_neuron.testing import Program, close, run_replicas
from tpcore_nxd.trace import with_compiler

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(TESTS / "core" / "trace"))

from bert_model import shard_bert
from models import Answers, Calls, Encoder, batch, error_of, traced_by

ROUNDS = 1e-5  # float32 sums in another order


def serve(folder: Path, calls: Calls) -> Answers:
    manifest = opened(folder)
    rank = Rank(tpcore.init(manifest.backend, manifest.tp), folder, manifest, folder)
    return [rank.run(program, inputs) for program, inputs in calls]


def traced(folder: Path, func: Callable[[], Any], inputs: Any, tp: int, **options: Any) -> TensorParallelModel:
    """With a run of replicas for every call."""
    trace, run = partial(run_replicas, trace_rank, tp), partial(run_replicas, serve, tp, folder)
    return traced_by(trace, run, folder, func, inputs, tp, "neuron", **options)


def make() -> Encoder:
    return Encoder(True, dtype=torch.float32)


def test_equals_the_unsharded_model(tmp_path):
    model = traced(tmp_path, make, batch(2, 8), 4, bucket_inputs=[batch(4, 12)])
    for rows, length in ((2, 8), (4, 12), (3, 9)):
        assert error_of(model, rows, length, dtype=torch.float32) < ROUNDS


def test_the_program_holds_no_weights_and_one_serves_all_ranks(tmp_path):
    model = traced(tmp_path, make, batch(2, 8), 2)
    files = {p.name: p.stat().st_size for p in (tmp_path / "programs/0").iterdir()}
    assert sorted(files) == ["constants.safetensors", "parameters.json", "program.hlo", "program.mlir"]
    assert {p.name for p in tmp_path.glob("tp_rank_*")} == {"tp_rank_0", "tp_rank_1"}
    said = json.loads((tmp_path / "programs/0/parameters.json").read_text())["parameters"]
    kinds = Counter(kind for kind, _ in said)
    assert kinds["weight"] == len(model.manifest.weights)
    assert (kinds["input"], kinds["rank"]) == (2, 1)  # of the groups, tp is used
    constants = load_file(tmp_path / "programs/0/constants.safetensors")
    assert kinds["constant"] == len(constants)
    assert all(t.numel() == 1 for t in constants.values())
    hlo = (tmp_path / "programs/0/program.hlo").read_bytes()
    weights = load_file(tmp_path / "tp_rank_0/model.safetensors")
    assert all(bytes(t.reshape(-1)[:4].view(torch.uint8).tolist()) not in hlo for t in weights.values() if t.any())
    program = Program((tmp_path / "programs/0/program.mlir").read_text())
    # embedding, attention's and the MLP's row layers; the gathered head
    assert Counter(c.kind for c in program.collectives) == {"all_reduce add": 3, "all_gather": 1}


def hugging_face(sharded: bool) -> BertForMaskedLM:
    """With transformers' own masks, which look for padding."""
    # weights of 0.2, not 0.02: what is masked must matter by far more than rounding
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.2}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=4, **sizes)
    torch.manual_seed(0)
    model = BertForMaskedLM(config).eval()
    if sharded:
        shard_bert(model, gather_logits=True)
    model.set_attn_implementation("sdpa")
    return model


def test_a_hugging_face_model_with_an_attention_mask(tmp_path):
    ids = torch.randint(67, (2, 8), generator=torch.Generator().manual_seed(0))
    full, padded = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    padded[1, 5:] = 0
    # what it is traced with has no padding: the program must not have taken it for granted
    model = traced(tmp_path, partial(hugging_face, True), (ids, full), 2)
    plain = hugging_face(False)
    with torch.no_grad():
        want = [plain(ids, mask).logits for mask in (padded, full)]
    assert float((want[0] - want[1]).abs().max()) > 0.01
    for mask, logits in zip((padded, full), want, strict=True):
        # float32 sums in another order
        torch.testing.assert_close(model(ids, mask).logits, logits, rtol=0, atol=1e-5)


class Counting(torch.nn.Module):
    """Adds to its state, and returns it as it was too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row = tpcore.RowParallelLinear(4, 3, dtype=torch.float32)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.row(x) + self.seen, self.seen, self.seen + x.sum(0)[:3]


def counting() -> tuple[Counting, dict]:
    model = Counting()
    return model, {model.seen: 2}


CALLS = [torch.full((2, 4), float(i)) for i in (1, 2, 3)]


def kept(folder: Path) -> list[list[torch.Tensor]]:
    return serve(folder, [(0, [x]) for x in CALLS])


def check_kept(found: list[list[torch.Tensor]]) -> None:
    torch.manual_seed(0)
    plain, seen = torch.nn.Linear(4, 3), torch.zeros(3)
    for x, (y, before) in zip(CALLS, found, strict=True):
        assert torch.equal(before, seen)
        torch.testing.assert_close(y, plain(x) + seen, rtol=0, atol=1e-6)
        seen = seen + x.sum(0)[:3]


def test_state_is_kept_from_call_to_call(tmp_path):
    traced(tmp_path, counting, CALLS[0], 2)
    for rank in run_replicas(kept, 2, tmp_path):
        check_kept(rank)


class Stubborn(torch.nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "rank":
            return x + (tpcore.current().rank + 2)
        return x * 2 if bool(x.sum() > 0) else x


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("rank", "ranks 0 and 1 would need different programs"),
        ("value", r"__bool__ at .*test_xla_trace\.py:\d+ reads a value, and a traced model has none"),
    ],
)
def test_what_cannot_be_traced_is_said(tmp_path, what, said):
    with pytest.raises(tpcore.BackendError, match=said):
        traced(tmp_path, lambda: Stubborn(what), torch.ones(2, 3), 2)


def test_a_damaged_program_is_an_error(tmp_path):
    manifest = traced(tmp_path, make, batch(2, 8), 2).manifest
    (tmp_path / "programs/0/program.hlo").write_bytes(b"not a module")

    def load() -> None:
        ctx = tpcore.init("neuron", 2)
        ctx.backend.load_program(tmp_path / "programs/0", read_weights(tmp_path, ctx.rank, manifest))

    with pytest.raises(tpcore.BackendError, match=r"program\.hlo is damaged"):
        run_replicas(load, 2)


# -- through torch_neuronx ----------------------------------------------------------------------------------
STANDIN = Path(__file__).parent / "standin"


@pytest.fixture
def neuronx(monkeypatch):
    """Replicas in processes that find the stand-in for torch_neuronx."""
    close()
    monkeypatch.syspath_prepend(STANDIN)  # replicas import from where the caller does
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-7")
    yield monkeypatch
    close()


def test_where_the_neuron_tools_are_the_program_is_compiled_and_that_runs(neuronx, tmp_path):
    with pytest.raises(tpcore.BackendError, match="2 processes were started on this host, which shows 1 Neuron"):
        run_replicas(lambda: tpcore.init("neuron", 2), 2, env={"NEURON_RT_VISIBLE_CORES": "0-0"})
    options = CompilerOptions(("--model-type=transformer", "-O1"), str(tmp_path / "work"))
    model = traced(tmp_path / "encoder", with_compiler(options, make, "neuron"), batch(2, 8), 2)
    assert (tmp_path / "encoder/programs/0/neuron.pt").is_file()
    assert (tmp_path / "work/0/args").read_text() == "--model-type=transformer -O1"
    assert error_of(model, 2, 8, dtype=torch.float32) < ROUNDS
    (tmp_path / "counting").mkdir()
    traced(tmp_path / "counting", counting, CALLS[0], 2)
    for rank in run_replicas(kept, 2, tmp_path / "counting"):
        check_kept(rank)
    neuronx.undo()
    close()
    assert error_of(model, 2, 8, dtype=torch.float32) < ROUNDS  # what it was compiled from runs without the tools


# -- from end to end ----------------------------------------------------------------------------------------
def test_a_model_is_traced_saved_and_served(monkeypatch, tmp_path):
    """In processes of their own, as on a NeuronCore: XLA on a CPU connects no more than one."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    model = parallel_model_trace(make, batch(2, 8), 1, backend="neuron")
    parallel_model_save(model, tmp_path / "saved")
    model.close()
    with parallel_model_load(tmp_path / "saved", timeout=120) as served:
        assert error_of(served, 2, 8, dtype=torch.float32) < ROUNDS


def test_several_processes_on_a_cpu_are_refused_in_favour_of_replicas(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    said = r"2 processes were started and the XLA runtime connects 1: on a CPU it .*run_replicas\(fn, 2\)"
    with pytest.raises(tpcore.BackendError, match=said):
        parallel_model_trace(make, batch(2, 8), 2, backend="neuron")
