"""What ``explain`` says of a step is what the step does: its collectives, its bytes, ranks that disagree."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import counting, hf
from helpers.places import ROOT
from helpers.tiers import tiers
from test_mistakes import GIVEN
from test_mistakes import Model as Mistaken
from test_new_primitive import run_with_a_new_primitive
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tpcore
import tpcore_explain.explain
from tpcore import ColumnParallelLinear, Mesh, ParallelEmbedding, RowParallelLinear
from tpcore.cli.app import app
from tpcore.comm import mappings as ops
from tpcore.testing import run_ranks
from tpcore_explain import target
from tpcore_explain.summary import kinds

HERE = Path(__file__).name


class Mlp(nn.Module):
    def __init__(self, sequence: bool = False) -> None:
        super().__init__()
        kept = {"sequence_dim": 1 if sequence else None}
        self.norm = tpcore.LayerNorm(8, sequence_parallel=sequence)
        self.up = ColumnParallelLinear(8, 12, gather_output=False, pad=True, **kept)
        self.down = RowParallelLinear(12, 8, input_is_parallel=True, pad=True, **kept)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Everything at once: a padded vocabulary, fused projections, two blocks, a loss."""

    def __init__(self, sequence: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = ParallelEmbedding(10, 8, pad=True, padding_idx=0, sequence_dim=1 if sequence else None)
        self.blocks = nn.ModuleList(Mlp(sequence) for _ in range(2))
        self.whole = nn.Linear(8, 8)
        self.fused = ColumnParallelLinear(8, 24, blocks=3)
        self.back = RowParallelLinear(24, 8, blocks=3)
        self.head = ColumnParallelLinear(8, 10, bias=False, gather_output=False, pad=True)
        self.sequence, self.recompute = sequence, recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if self.sequence:
            x = ops.all_gather(x, self.embedding.tp, 1)
        x = self.back(self.fused(self.whole(x)))
        return tpcore.parallel_cross_entropy(self.head(x), ids, 0.1, vocab_size=10).mean()


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = ParallelEmbedding(9, 8, shard_across_embedding=True, max_norm=1.0, scale_grad_by_freq=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).double().square().mean()


def ids() -> Tensor:
    return torch.arange(16).view(2, 8) % 9


FACTORIES: dict[str, Callable[[], Any]] = {
    "net": lambda: (Net(), ids()),
    "sequence parallel": lambda: (Net(sequence=True), (ids(),)),
    "recomputed": lambda: (Net(recompute=True), {"ids": ids()}),
    "columns": lambda: (Columns(), lambda model: model(ids())),
    "half": lambda: (Net().bfloat16(), ids()),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def zero1(model: nn.Module, master_dtype: torch.dtype | None = None) -> torch.optim.Optimizer:
    return tpcore.Zero1(torch.optim.AdamW, model.parameters(), master_dtype=master_dtype)


def seen_in_threads(
    build: Callable[[], Any], tp: int, dp: int, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> list[tuple[list[Any], list[tuple[Any, ...]]]]:
    """Per rank: the collectives of a real step, and (name, bytes of parameter, gradient, state)."""
    mesh = Mesh({"pp": 1, "dp": dp, "tp": tp})

    def step(ctx: tpcore.ParallelContext) -> list[tuple[Any, ...]]:
        model, inputs = build()
        optimizer = make(model)
        if callable(inputs) and not isinstance(inputs, Tensor):
            loss = inputs(model)
        elif isinstance(inputs, dict):
            loss = model(**inputs)
        else:
            loss = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        loss.backward()
        gradients = {p: p.grad.nbytes for p in model.parameters()}
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        return [
            (n, p.nbytes, gradients[p], sum(t.nbytes for t in optimizer.state[p].values()))
            for n, p in model.named_parameters()
        ]

    held, calls = counting.counted(mesh, step)
    return [([(c.axes, c.op, c.shape, c.dtype) for c in calls[r]], held[r]) for r in range(mesh.size)]


def assert_told(found: tpcore_explain.explain.Explanation, seen: list[tuple[list[Any], list[Any]]]) -> None:
    assert found.disagreement is None
    assert found.ranks == tuple(range(len(seen)))
    for rank, (calls, held) in enumerate(seen):
        program = found.program(rank)
        assert [(c.axes, c.op, c.shape, c.dtype) for c in program.collectives] == calls
        assert [(p.name, p.nbytes, p.gradient, p.optimizer) for p in program.parameters] == held


@pytest.mark.parametrize(("tp", "dp"), tiers([(2, 2), (4, 1)], [(1, 1), (2, 1), (1, 2)]))
@pytest.mark.parametrize("kind", FACTORIES)
def test_what_is_told_is_what_ranks_do(kind: str, tp: int, dp: int) -> None:
    found = tpcore.explain(FACTORIES[kind], tp=tp, dp=dp)
    assert_told(found, seen_in_threads(FACTORIES[kind], tp, dp))
    assert len(found.programs) == 1  # all ranks alike


@pytest.mark.parametrize(("kind", "master"), [("net", None), ("half", torch.float32)])
@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (1, 4), (1, 3)])
def test_a_cut_optimizer_is_told_to_the_byte(kind: str, master: torch.dtype | None, tp: int, dp: int) -> None:
    found = tpcore.explain(FACTORIES[kind], tp=tp, dp=dp, optimizer="zero1", master_dtype=master)
    assert_told(found, seen_in_threads(FACTORIES[kind], tp, dp, lambda m: zero1(m, master)))
    assert [c.op for c in found.program(0).collectives if c.phase == "optimizer"] == ["all_gather dim 0"]


def test_each_collective_has_its_phase_module_and_line() -> None:
    program = tpcore.explain(FACTORIES["sequence parallel"], tp=2, dp=2).program(3)
    by_module = {(c.phase, c.op, c.module) for c in program.collectives}
    assert ("forward", "reduce_scatter dim 1", "embedding") in by_module
    assert ("forward", "all_gather dim 1", "Net") in by_module  # made by the model itself
    assert ("backward", "reduce_scatter dim 1", "Net") in by_module
    for i in range(2):
        assert ("forward", "all_gather dim 1", f"blocks.{i}.up") in by_module
        assert ("backward", "all_gather dim 1", f"blocks.{i}.down") in by_module
        assert ("backward", "all_reduce sum", f"blocks.{i}.norm") in by_module
    lines = Path(__file__).read_text().splitlines()
    for call in program.collectives:
        if call.phase in ("forward", "backward"):
            path, line = re.match(r"(.*):(\d+) in forward", call.site).groups()  # type: ignore[union-attr]
            assert Path(path).name == HERE
            assert any(part in lines[int(line) - 1] for part in ("self.", "block(x)", "def forward"))
    assert {c.phase for c in program.collectives} == {"forward", "backward", "reduction", "clipping"}
    assert {c.axes for c in program.collectives if c.phase == "reduction"} == {("dp",)}
    sent = {c.op.split()[0]: c.sent / c.nbytes for c in program.collectives if c.axes == ("tp",) and c.nbytes > 4}
    assert sent == {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 1.0}  # of a ring of two
    program = tpcore.explain(FACTORIES["recomputed"], tp=2).program(0)
    again = [c.module for c in program.collectives if c.phase == "backward" and c.shape == (2, 8, 8)]
    assert {"blocks.0.down", "blocks.1.down"} <= set(again)


# -- ranks that would hang ---------------------------------------------------------------------------------
def explained(run: Callable[[nn.Sequential, tpcore.ParallelContext], Tensor], tp: int, dp: int = 1) -> Any:
    """A step of three layers, of whose output on ``[4, 8]`` ``run`` makes more."""

    def build() -> Any:
        layers = nn.Sequential(*(RowParallelLinear(8, 8) for _ in range(3)))
        return layers, lambda model: run(model, tpcore.current()).sum()

    return tpcore.explain(build, tp=tp, dp=dp, max_norm=None)


def leaves_out(layers: nn.Sequential, ctx: tpcore.ParallelContext) -> Tensor:
    x = layers[0](torch.zeros(4, 8))
    return layers[2](x if ctx.rank == 1 else layers[1](x))


def logs(layers: nn.Sequential, ctx: tpcore.ParallelContext) -> Tensor:
    x = layers(torch.zeros(4, 8))
    if ctx.rank == 0:
        ctx.comm("tp").all_gather(x.mean().reshape(1), 0)
    return x


def summed(*groups: tuple[str, str, int | None], narrow: int | None = None) -> Any:
    """All-reduces, each of some ranks over an axis, or groups of a size within it. ``narrow``: has half the columns."""

    def run(layers: nn.Sequential, ctx: tpcore.ParallelContext) -> Tensor:
        x = layers(torch.zeros(4, 8))
        for ranks, axis, within in groups:
            if str(ctx.rank) in ranks:
                ctx.comm(axis, within=within).all_reduce(x[:, :4] if ctx.rank == narrow else x)
        return x

    return run


PAIR, WHOLE = ("0123", "tp", 2), ("0123", "tp", None)
LINE = r"\S*test_explain.py:\d+"
BUGS: dict[str, tuple[Any, int, int, str]] = {
    "leaves out a layer": (
        *(leaves_out, 2, 2),
        r"ranks 0 and 1 of group \(0, 1\) disagree on collective #1 of the group:\n"
        rf"  rank 0: all_reduce sum of float32 \[4, 8\], forward in module 1 at {LINE} in leaves_out\n"
        rf"  rank 1: all_reduce sum of float32 \[4, 8\], forward in module 2 at {LINE} in leaves_out\n",
    ),
    "logs on one rank": (
        *(logs, 2, 2),
        r"ranks 0 and 1 of group \(0, 1\) disagree on collective #3 of the group:\n"
        rf"  rank 0: all_gather dim 0 of float32 \[1\], forward at {LINE} in logs\n"
        rf"  rank 1: all_gather dim 1 of float32 \[4, 4\], backward in module 2 at {LINE} in logs\n",
    ),
    "gives another shape": (
        *(summed(WHOLE, narrow=3), 2, 2),
        r"ranks 2 and 3 of group \(2, 3\) disagree on collective #3 of the group:\n"
        r"  rank 2: all_reduce sum of float32 \[4, 8\], .*\n  rank 3: all_reduce sum of float32 \[4, 4\], ",
    ),
    "crosses groups": (
        *(summed(("03", "tp", None), ("0123", "dp", None), ("12", "tp", None)), 2, 2),
        r"the step would hang, its ranks waiting for one another:\n"
        r"  rank 0 waits for group \(0, 1\): .*\n  rank 1 waits for group \(1, 3\): .*\n"
        r"  rank 2 waits for group \(0, 2\): .*\n  rank 3 waits for group \(2, 3\): ",
    ),
    "crosses a group within an axis": (
        *(summed(("01", "tp", 2), ("0", "tp", None), PAIR, ("123", "tp", None)), 4, 1),
        r"the step would hang.*:\n  rank 0 waits for group \(0, 1, 2, 3\): .*\n  rank 1 waits for group \(0, 1\): ",
    ),
}


@pytest.mark.parametrize("how", BUGS)
def test_ranks_that_would_hang_are_found_before_launch(how: str) -> None:
    run, tp, dp, match = BUGS[how]
    told = explained(run, tp, dp).disagreement
    assert told is not None
    assert re.search(match, told), told


class Logs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + logs(nn.Sequential(), tpcore.current())


def ends_early() -> Any:
    return nn.Sequential(nn.Linear(8, 8), Logs()), torch.ones(4, 8)


IN_LOGS = rf"all_gather dim 0 of float32 \[1\], forward in module 1 at {LINE} in logs"


def test_a_rank_that_ends_early_is_found() -> None:
    ends = tpcore.explain(ends_early, tp=2, max_norm=None).disagreement or ""
    waits = rf"rank 0 waits for group \(0, 1\): {IN_LOGS}\n  rank 1 has made all of its 0 collectives"
    assert re.search(waits, ends), ends


def test_a_group_within_an_axis_is_not_taken_for_the_whole_axis() -> None:
    found = explained(summed(("01", "tp", 2), PAIR, WHOLE), 4)  # at first alone of the two pairs
    assert found.disagreement is None
    calls = [c for c in found.program(0).collectives if not c.module]
    assert [(call.size, times) for call, _, times in kinds(calls)] == [(2, 2), (4, 1)]


@pytest.mark.parametrize(
    ("seed", "batch", "says"),
    [
        (1, 0, "differ in the random state for the initial weight of ParallelEmbedding at .*test_mistakes"),
        (0, 1, r"differ in input 0 of Model\. .*the same batch and the same seed"),
    ],
)
def test_a_recording_tells_which_ranks_of_one_group_have_other_data(seed: int, batch: int, says: str) -> None:
    def build(more: int | None = None) -> Any:
        ctx = tpcore.current()
        odd = ctx.rank == 3
        torch.manual_seed(seed * odd)
        more = ctx.coord("dp") + batch * odd if more is None else more
        return Mistaken(), ((GIVEN[0] + more) % 5, GIVEN[1])

    (found,) = tpcore.explain(build, tp=2, dp=2).mistakes
    assert re.search(f"ranks 2 and 3 of one tp group {says}", found), found
    batches = iter(range(9))  # that differ at each call say nothing
    assert tpcore.explain(lambda: build(next(batches)), tp=2).mistakes == ()


def test_a_recording_says_what_to_do_about_torchs_data_parallelism() -> None:
    with pytest.raises(ValueError, match=r"rank 0 needs .* at .*test_explain.*take the parts of tp ranks"):
        tpcore.explain(lambda: (DistributedDataParallel(Mistaken()), GIVEN), tp=2)


def test_ranks_of_a_large_mesh_are_sampled_at_its_ends() -> None:
    found = tpcore.explain(FACTORIES["columns"], tp=8, dp=64)
    assert found.ranks == (0, 7, 504, 511)
    assert tpcore.explain(FACTORIES["columns"], tp=8, dp=64, ranks=[5, 3]).ranks == (3, 5)
    with pytest.raises(ValueError, match="rank 1 was not recorded"):
        found.program(1)


def test_no_memory_is_used_and_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            ColumnParallelLinear(1 << 20, 1 << 20, gather_output=False),
            nn.Dropout(),
            RowParallelLinear(1 << 20, 8, input_is_parallel=True),
        )

    found = tpcore.explain(build, tp=4, seq_len=3)  # 1 TB a rank
    assert found.program(0).parameters[0].nbytes == 1 << 40
    assert torch.equal(torch.get_rng_state(), before)
    assert not tpcore.is_initialized()


def test_options() -> None:
    def build(batch_size: int, seq_len: int) -> Any:
        return nn.Sequential(nn.Linear(8, 8)), torch.zeros(batch_size, seq_len, 8)

    def cut(model: nn.Sequential) -> None:
        model[0] = ColumnParallelLinear(8, 8)

    found = tpcore.explain(
        build, tp=2, batch_size=3, seq_len=5, parallelize=cut, dtype=torch.bfloat16, optimizer="SGD", max_norm=None
    )
    program = found.program(0)
    (gathered,) = program.collectives  # the input needs no gradient, so backward sums nothing
    assert (gathered.op, gathered.shape, gathered.dtype) == ("all_gather dim 2", (3, 5, 4), "bfloat16")
    assert [(p.shape, p.full, p.cut, p.optimizer) for p in program.parameters] == [
        ((4, 8), (8, 8), True, 0),
        ((4,), (8,), True, 0),
    ]


def counted(model: nn.Module, **options: int) -> Tensor:
    assert torch.bincount(torch.tensor([1, 1], device="cpu"), **options)[1] == 2
    chosen = model(torch.zeros(2, 8)).topk(2).indices.reshape(-1)
    return model(torch.bincount(chosen, **options).float()).sum()


def test_values_are_counted_where_their_number_is_said() -> None:
    tpcore.explain(lambda: (nn.Linear(8, 8), partial(counted, minlength=8)))
    with pytest.raises(ValueError, match=r"rank 0 reads a value at \S*test_explain.py:\d+ in counted"):
        tpcore.explain(lambda: (nn.Linear(8, 8), counted))


def reads_a_value() -> Any:
    def loss(model: nn.Module) -> Tensor:
        out = model(torch.zeros(2, 8)).sum()
        return out * 2 if out.item() > 0 else out

    return nn.Linear(8, 8), loss


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (reads_a_value, {}, r"rank 0 reads a value at \S*test_explain.py:\d+ in loss, and a recorded step has none"),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 3, 1)),
            {},
            r"inputs of Sequential cannot be told from its first layer: return \(model, inputs\)",
        ),
        (lambda: 3, {}, "returned int, not a module"),
        (lambda: (nn.Linear(2, 2), lambda model: torch.zeros(2)), {}, "the loss function returned torch.float32"),
        (lambda: nn.Embedding(3, 3).requires_grad_(False), {}, "returned torch.float32 .*, none of it with a gradient"),
        ("no_such_file.py:build", {}, "there is no file .*no_such_file.py"),
        ("tpcore:no_such_function", {}, "tpcore has no function 'no_such_function'"),
        ("NoSuchModel", {}, "there is no file, folder or model class of transformers NoSuchModel"),
        (FACTORIES["net"], {"optimizer": "Adan"}, "no optimizer 'Adan'"),
        (FACTORIES["net"], {"optimizer": "zero1:Adan"}, "no optimizer 'Adan'"),
        (FACTORIES["net"], {"master_dtype": torch.float32}, "only Zero1 keeps master weights"),
        (FACTORIES["net"], {"ranks": [9]}, "rank 9 is outside a mesh of 2 ranks"),
        (FACTORIES["net"], {"plan": "auto", "parallelize": len}, "two ways to cut"),
        (FACTORIES["net"], {"sequence_parallel": True}, "sequence_parallel can only be given with a plan"),
    ],
)
def test_targets_and_options_that_do_not_fit(target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tpcore.explain(target, tp=2, **options)
    assert not tpcore.is_initialized()


# -- a Hugging Face config, and the command line ---------------------------------------------------------

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**SIZES, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 101, "max_position_embeddings": 32}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return Path(hf.folder(tmp_path, "BertForPreTraining", **BERT))


def test_a_config_of_3_gb_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 3 << 30)
    code, out = invoke(str(tmp_path), "--tp", "2")
    assert code == 2
    (line,) = out.splitlines()
    assert "config.json is damaged: it has 3221225472 bytes, more than the limit of 268435456" in line


SHARD_BERT = f"{ROOT / 'examples/bert_model.py'}:shard_bert"


@pytest.mark.parametrize("file", ["", "config.json"])
def test_a_hugging_face_config_with_a_function_that_cuts_it(bert: Path, file: str) -> None:
    found = tpcore.explain(str(bert / file), tp=4, batch_size=2, seq_len=8, parallelize=SHARD_BERT)
    program = found.program(2)
    assert program.model == "BertForPreTraining"
    words = next(p for p in program.parameters if p.name.endswith("word_embeddings.weight"))
    assert (words.shape, words.full, words.cut) == ((26, 16), (101, 16), True)
    # of each layer two sums forward and four backward (q, k, v, MLP); one of the embedding, one of the head
    assert [c.phase for c in program.collectives].count("forward") == 2 * 2 + 1
    assert [c.phase for c in program.collectives].count("backward") == 2 * 4 + 1
    assert found.disagreement is None


def test_a_model_class_that_nobody_has_cut() -> None:
    code, out = invoke("T5ForConditionalGeneration", "--tp", "2", "--seq-len", "8")
    assert code == 0
    assert "No parameter of T5ForConditionalGeneration is sharded: each of the 2 tp ranks holds the whole" in out
    assert "No collectives." in out
    assert "Without a gradient" not in out


WIDE = {**SIZES, "hidden_size": 32, "intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**WIDE, "num_key_value_heads": 1, "vocab_size": 99},
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "ViTForImageClassification": {**WIDE, "image_size": 32, "patch_size": 8},
    "MixtralForCausalLM": {**WIDE, "num_key_value_heads": 2, "num_local_experts": 4},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_transformers_by_its_own_plan(name: str, tmp_path: Path) -> None:
    """Each rank's parameters and collectives are those of tpcore.parallelize."""
    where = hf.folder(tmp_path, name, **FAMILIES[name])
    found = tpcore.explain(where, tp=2, seq_len=8, plan="auto")
    assert found.disagreement is None
    assert found.mistakes == ()
    program = found.program(1)
    assert sum(p.nbytes for p in program.parameters if p.cut) > sum(p.nbytes for p in program.parameters if not p.cut)
    if name == "MixtralForCausalLM":
        ways = {"dispatch": "auto", "capacity_factor": 0.5}
        sent = tpcore.explain(where, ep=2, seq_len=8, plan="auto", **ways).program(1)
        assert dict(sent.routes)["model.layers.0.mlp.experts"].startswith("all_to_all: all-to-all sends 1,120 bytes")
        assert {c.op for c in sent.collectives if "experts" in c.module} == {"all_to_all dim 0 to 0"}
        first = sum(c.sent for c in sent.collectives if c.phase == "forward" and "layers.0.mlp.experts" in c.module)
        assert first == 1120  # 4 of 8 tokens: 32 numbers there and back, 2 numbers of experts and 2 weights there
        code, out = invoke(where, "--ep", "2", "--seq-len", "8", "--plan", "auto", "--dispatch", "all_to_all")
        assert code == 0
        assert "model.layers.*.mlp.experts: all_to_all: all-to-all sends" in out
    if name == "LlamaForCausalLM":
        # the embedding, then two in each layer; the loss of a cut vocabulary: three numbers of each token
        forward = [c for c in program.collectives if c.phase == "forward"]
        assert [c.module.rpartition(".")[2] for c in forward[:5]] == ["embed_tokens", *["o_proj", "down_proj"] * 2]
        assert all(c.nbytes < 100 for c in forward[5:])
        spread = tpcore.explain(where, tp=2, seq_len=8, plan="auto", sequence_parallel=True).program(0)
        assert "reduce_scatter" in " ".join(c.op for c in spread.collectives)


def test_a_training_step_fills_no_cache_of_generation() -> None:
    with torch.device("meta"):
        model, inputs = target.build("GPT2Model", 1, 8)
        assert model(**inputs).past_key_values is None


def test_a_plan_in_a_file_and_what_is_wrong_with_one(tmp_path: Path) -> None:
    rules = tmp_path / "plan.json"
    rules.write_text(json.dumps({"transformer.h.*.mlp": "replicate"}))
    code, out = invoke("GPT2LMHeadModel", "--tp", "2", "--seq-len", "8", "--plan", str(rules))
    assert code == 0, out
    assert "transformer.h.*.mlp.c_fc (Conv1D)" in out
    assert "transformer.h.*.attn.c_attn (" not in out
    rules.write_text("[]")
    for plan, tp, wrong in (
        (str(rules), "2", "is no plan"),
        ("none", "2", "is no file"),
        ("auto", "5", "tp=5 does not fit GPT2LMHeadModel"),
    ):
        code, out = invoke("GPT2LMHeadModel", "--tp", tp, "--seq-len", "8", "--plan", plan)
        assert code == 2
        assert wrong in out


def invoke(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["explain", *args])
    return done.exit_code, done.output


def test_the_command_prints_tables_and_draws_them(bert: Path, tmp_path: Path) -> None:
    """``docs/explain.md`` shows a whole table."""
    picture = tmp_path / "out.png"
    code, out = invoke(str(bert), "--tp", "2", "--seq-len", "8", "--parallelize", SHARD_BERT, "--plot", str(picture))
    assert code == 0, out
    assert "BertForPreTraining on pp=1, dp=1, tp=2: ranks 0, 1 alike" in out
    assert "Held in full by each of the 2 tp ranks:" in out
    sites = [line for line in out.splitlines() if re.search(r"\.py:\d+", line)]
    assert sites  # no terminal: lines are whole, however long
    assert all(line.startswith("    ") for line in sites)
    assert any("bert.encoder.layer.*.attention.output.dense" in line for line in sites)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_json(bert: Path) -> None:
    code, out = invoke(str(bert), "--tp", "2", "--parallelize", SHARD_BERT, "--seq-len", "8", "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["mesh"], told["disagreement"]) == ({"pp": 1, "dp": 1, "tp": 2}, None)
    (program,) = told["programs"]
    assert program["ranks"] == [0, 1]
    fields = "phase axes size op shape dtype nbytes module site sent"
    assert set(program["collectives"][0]) == set(fields.split())


def raises() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 4)), lambda model: model(torch.ones(2, 4)).sum()


def cut_softmax() -> Any:
    return nn.Sequential(ColumnParallelLinear(4, 8, gather_output=False), nn.Softmax(-1)), torch.ones(2, 4)


TOLD = [
    (":raises", 2, r"^tpcore explain: RuntimeError: .*\(rank 0, forward, module 1 at .*test_explain.py:\d+ in "),
    ("", 2, r"^tpcore explain: .*test_explain.py:make$"),
    (":cut_softmax", 1, "^1: softmax sees only 4 of 8 features"),
    (":ends_early", 1, rf"^  rank 0 waits for group .*: {IN_LOGS}$"),
]


@pytest.mark.parametrize(("function", "status", "line"), TOLD)
def test_the_command_ends_with_1_for_a_finding_and_with_2_where_no_step_can_be_shown(
    function: str, status: int, line: str
) -> None:
    code, out = invoke(f"{__file__}{function}", "--tp", "2")
    assert code == status
    assert any(re.search(line, said) for said in out.splitlines()), out
    assert status == 1 or len(out.splitlines()) == 1


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for width in (2, 3):
        path = tmp_path / str(width) / "model.py"
        path.parent.mkdir()
        path.write_text(f"from torch import nn\n\ndef make():\n    return nn.Linear({width}, 4)\n")
        assert tpcore.explain(f"{path}:make").program(0).parameters[0].shape == (4, width)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("no.such.module:build",), "No module named 'no'"),
        (("GPT2LMHeadModel", "--dtype", "float31"), "torch has no floating dtype 'float31'"),
        (("GPT2LMHeadModel", "--ranks", "a,b"), "--ranks takes numbers with commas, as 0,3, not 'a,b'"),
    ],
)
def test_the_command_refuses_in_one_line(args: tuple[str, ...], message: str) -> None:
    code, out = invoke(*args)
    assert code == 2
    assert out.startswith("tpcore explain: ")
    assert message in out


@pytest.mark.parametrize("sizes", [{"hidden_size": -64}, {"num_attention_heads": 0}, {"vocab_size": "many"}])
def test_a_configuration_of_which_no_model_is_made(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """One sentence for what ends in errors of many kinds in the code that makes the model."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    with torch.device("meta"), pytest.raises(ValueError, match=r"config.json has sizes of which no model is made: \S"):
        target.build(str(file), 1, 8)


def test_a_sharded_model_is_shown_parameter_by_parameter() -> None:
    def rank(ctx: tpcore.ParallelContext) -> Any:
        torch.manual_seed(0)
        model = hf.llama(tie_word_embeddings=True, vocab_size=99)
        with pytest.raises(ValueError, match="nothing of this LlamaForCausalLM is sharded"):
            tpcore.explain(model)
        return tpcore.explain(tpcore.parallelize(model)), model

    found, model = run_ranks(Mesh({"tp": 2}), rank)[0]
    held = {id(p): p.nbytes for p in model.parameters()}
    whole = sum(p.nbytes for p in hf.llama(tie_word_embeddings=True, vocab_size=99).parameters())
    assert sum(row.nbytes * row.times for row in found.rows) == sum(held.values())
    lines = str(found).splitlines()
    assert lines[0].startswith(f"LlamaForCausalLM on tp=2: {sum(held.values()):,} of ")
    words = {line.split()[0]: line for line in lines[2:]}
    assert words["lm_head.weight"].endswith("tied to model.embed_tokens.weight")
    assert words["model.layers.*.mlp.down_proj.weight"].endswith("dim 1 over tp")
    assert words["model.embed_tokens.weight"].endswith("dim 0 over tp, padded")
    assert words["model.norm.weight"].endswith("whole: of full features, every rank the same")
    assert sum(row.full_nbytes for row in found.rows) == whole


NEW_PRIMITIVE = """
import torch, tpcore
from torch import nn

class Reversing(nn.Module):
    def __init__(self):
        super().__init__()
        self.tp, self.weight = tpcore.current().comm("tp"), nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.tp.reverse(x) * self.weight

(_, program), *_ = tpcore.explain(lambda: (Reversing(), torch.ones(2, 3)), tp=2).programs
(call,) = [c for c in program.collectives if c.op == "reverse"]
assert call.sent == call.nbytes == 24
"""


@pytest.mark.slow  # a process that imports a copy of the source
def test_a_new_primitive_is_told_by_its_entry_of_the_table(tmp_path: Path) -> None:
    run_with_a_new_primitive(tmp_path, NEW_PRIMITIVE)


def test_explain_tells_what_each_stage_costs() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tpcore.PipelinedLayers([nn.Linear(8, 8) for _ in range(6)], 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    found = tpcore.explain(lambda: (Tower(), torch.zeros(8, 8)), pp=3)
    assert found.disagreement is None
    unit = 2 * 8 * 4  # bytes of a microbatch
    for stage, (ranks, program) in enumerate(found.programs):
        assert ranks == (stage,)
        (cost,) = program.pipelines
        assert cost.layers == (str(2 * stage), str(2 * stage + 1))
        assert (cost.stage, cost.bubble, cost.input_bytes) == (stage, 2 / 6, unit)
        assert (cost.kept, cost.kept_lockstep) == (6 * unit, 5 * unit)
        moved = [c.sent for c in program.collectives if c.op.startswith("permute")]
        assert cost.sent == sum(moved) == 10 * unit
