"""What ``explain`` says of a step is what the step does: its collectives, its bytes, ranks that disagree."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tpcore
from tpcore import ColumnParallelLinear, Mesh, ParallelEmbedding, RowParallelLinear
from tpcore.cli.app import app
from tpcore.comm import mappings as ops
from tpcore.diagnose.explain.summary import kinds, pattern, size
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.threads import ThreadTransport

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).name
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]  # tp, dp


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
    logs: dict[int, list[Any]] = {r: [] for r in range(mesh.size)}

    class Spy(ThreadTransport):
        def exchange(self, op: str, x: Tensor) -> list[Tensor]:
            logs[self._rank].append((self.group.axes, op, tuple(x.shape), str(x.dtype).removeprefix("torch.")))
            return super().exchange(op, x)

    class Spied(ThreadBackend):
        def connect(self, group: Any, rank: int) -> ThreadTransport:
            return Spy(group, rank, self._world)

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

    held = run_ranks(mesh, step, backend=Spied)
    return [(logs[r], held[r]) for r in range(mesh.size)]


@pytest.mark.parametrize(("tp", "dp"), MESHES)
@pytest.mark.parametrize("kind", FACTORIES)
def test_what_is_told_is_what_ranks_do(kind: str, tp: int, dp: int) -> None:
    build = FACTORIES[kind]
    found = tpcore.explain(build, tp=tp, dp=dp)
    assert found.disagreement is None
    assert found.ranks == tuple(range(tp * dp))
    for rank, (calls, held) in enumerate(seen_in_threads(build, tp, dp)):
        program = found.program(rank)
        assert [(c.axes, c.op, c.shape, c.dtype) for c in program.collectives] == calls
        assert [(p.name, p.nbytes, p.gradient, p.optimizer) for p in program.parameters] == held
    assert len(found.programs) == 1  # all ranks alike


@pytest.mark.parametrize(("kind", "master"), [("net", None), ("half", torch.float32)])
@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (1, 4), (1, 3)])
def test_a_cut_optimizer_is_told_to_the_byte(kind: str, master: torch.dtype | None, tp: int, dp: int) -> None:
    build = FACTORIES[kind]
    found = tpcore.explain(build, tp=tp, dp=dp, optimizer="zero1", master_dtype=master)
    assert found.disagreement is None
    for rank, (calls, held) in enumerate(seen_in_threads(build, tp, dp, lambda m: zero1(m, master))):
        program = found.program(rank)
        told = [(c.axes, c.op, c.shape, c.dtype) for c in program.collectives]
        assert told == calls
        assert [(p.name, p.nbytes, p.gradient, p.optimizer) for p in program.parameters] == held
    entries = sum(math.prod(p.shape) for p in program.parameters)
    padding = sum(-math.prod(p.shape) % dp for p in program.parameters)
    each = 4 * (2 if master is None else 3)
    counts = 4 * len(program.parameters)  # of steps
    assert sum(p.optimizer for p in program.parameters) == each * (entries + padding) // dp + counts
    assert [c.op for c in program.collectives if c.phase == "optimizer"] == ["all_gather dim 0"]


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


def test_recomputed_layers_are_named_in_backward() -> None:
    program = tpcore.explain(FACTORIES["recomputed"], tp=2).program(0)
    again = [c.module for c in program.collectives if c.phase == "backward" and c.shape == (2, 8, 8)]
    assert {"blocks.0.down", "blocks.1.down"} <= set(again)


def test_bytes_on_the_wire() -> None:
    """A ring of 4: all_reduce 2 * 3/4 of the tensor, reduce_scatter 3/4; all_gather 3 times the chunk."""
    program = tpcore.explain(FACTORIES["sequence parallel"], tp=4).program(0)
    sent = {c.op.split()[0]: c.sent / c.nbytes for c in program.collectives if c.nbytes > 4}
    assert sent == {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 3.0}


class Wrong(nn.Module):
    """``how``: the bug."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RowParallelLinear(8, 8) for _ in range(3))
        self.how, self.ctx = how, tpcore.current()

    def forward(self, x: Tensor) -> Tensor:
        tp, dp, rank = self.ctx.comm("tp"), self.ctx.comm("dp"), self.ctx.rank
        for i, layer in enumerate(self.layers):
            if self.how == "leaves out a layer" and rank == 1 and i == 1:
                continue
            x = layer(x)
        if self.how == "logs on one rank" and rank == 0:
            tp.all_gather(x.mean().reshape(1), 0)
        if self.how == "gives another shape" and rank == 3:
            tp.all_reduce(x[:, :4])
        elif self.how == "gives another shape":
            tp.all_reduce(x)
        if self.how == "crosses groups":
            first, second = (tp, dp) if rank in (0, 3) else (dp, tp)
            first.all_reduce(x)
            second.all_reduce(x)
        return x


LINE = r"\S*test_explain.py:\d+"
BUGS = {
    "leaves out a layer": (
        r"ranks 0 and 1 of group \(0, 1\) disagree on collective #1 of the group:\n"
        rf"  rank 0: all_reduce sum of float32 \[4, 8\], forward in module layers.1 at {LINE} in forward\n"
        rf"  rank 1: all_reduce sum of float32 \[4, 8\], forward in module layers.2 at {LINE} in forward\n"
    ),
    "logs on one rank": (
        r"ranks 0 and 1 of group \(0, 1\) disagree on collective #3 of the group:\n"
        rf"  rank 0: all_gather dim 0 of float32 \[1\], forward in module Wrong at {LINE} in forward\n"
        rf"  rank 1: all_gather dim 1 of float32 \[4, 4\], backward in module layers.2 at {LINE} in forward\n"
    ),
    "gives another shape": (
        r"ranks 2 and 3 of group \(2, 3\) disagree on collective #3 of the group:\n"
        r"  rank 2: all_reduce sum of float32 \[4, 8\], .*\n  rank 3: all_reduce sum of float32 \[4, 4\], "
    ),
    "crosses groups": (
        r"the step would hang, its ranks waiting for one another:\n"
        r"  rank 0 waits for group \(0, 1\): .*\n  rank 1 waits for group \(1, 3\): .*\n"
        r"  rank 2 waits for group \(0, 2\): .*\n  rank 3 waits for group \(2, 3\): "
    ),
}


@pytest.mark.parametrize("how", BUGS)
def test_ranks_that_would_hang_are_found_before_launch(how: str) -> None:
    found = tpcore.explain(lambda: (Wrong(how), torch.zeros(4, 8)), tp=2, dp=2)
    assert found.disagreement is not None
    assert re.search(BUGS[how], found.disagreement), found.disagreement


def test_a_rank_that_ends_early_is_found() -> None:
    def loss(model: nn.Module) -> Tensor:
        out = model(torch.zeros(2, 8)).sum()
        if tpcore.current().rank == 0:
            tpcore.current().comm("tp").all_reduce(out.reshape(1))
        return out

    found = tpcore.explain(lambda: (nn.Sequential(nn.Linear(8, 8)), loss), tp=2, max_norm=None)
    assert re.search(
        r"rank 0 waits for group \(0, 1\): .*test_explain.py:\d+ in loss\n"
        r"  rank 1 has made all of its 0 collectives",
        found.disagreement or "",
    )


def test_a_group_within_an_axis_is_not_taken_for_the_whole_axis() -> None:
    def loss(model: nn.Module, crossed: bool) -> Tensor:
        out, ctx = model(torch.zeros(2, 8)).sum(), tpcore.current()
        tp, pair = ctx.comm("tp"), ctx.comm("tp", within=2)
        if ctx.rank < 2:
            pair.all_reduce(out.reshape(1))  # alone of the two pairs
        first, second = (tp, pair) if crossed and ctx.rank == 0 else (pair, tp)
        first.all_reduce(out.reshape(1))
        second.all_reduce(out.reshape(1))
        return out

    def build(crossed: bool) -> Any:
        return nn.Sequential(nn.Linear(8, 8)), lambda model: loss(model, crossed)

    found = tpcore.explain(lambda: build(False), tp=4, max_norm=None)
    assert found.disagreement is None
    assert [(k.first.size, k.times) for k in kinds(found.program(0).collectives)] == [(2, 2), (4, 1)]
    found = tpcore.explain(lambda: build(True), tp=4, max_norm=None)
    assert re.search(
        r"the step would hang.*:\n  rank 0 waits for group \(0, 1, 2, 3\): .*\n"
        r"  rank 1 waits for group \(0, 1\): ",
        found.disagreement or "",
    )


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


def reads_a_value() -> Any:
    def loss(model: nn.Module) -> Tensor:
        out = model(torch.zeros(2, 8)).sum()
        return out * 2 if out.item() > 0 else out

    return nn.Linear(8, 8), loss


def takes_something() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (reads_a_value, r"rank 0 reads a value at \S*test_explain.py:\d+ in loss, and a recorded step has none"),
        (takes_something, r"inputs of Sequential cannot be told from its first layer: return \(model, inputs\)"),
        (lambda: 3, "returned int, not a module"),
        (lambda: (nn.Linear(2, 2), lambda model: torch.zeros(2)), "the loss function returned torch.float32"),
        (lambda: nn.Embedding(3, 3).requires_grad_(False), "returned torch.float32 .*, none of it with a gradient"),
        ("no_such_file.py:build", "there is no file .*no_such_file.py"),
        ("tpcore:no_such_function", "tpcore has no function 'no_such_function'"),
        ("NoSuchModel", "transformers has no model class 'NoSuchModel'"),
    ],
)
def test_targets_that_are_none(target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tpcore.explain(target, tp=2)
    assert not tpcore.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "Adan"}, "no optimizer 'Adan'"),
        ({"optimizer": "zero1:Adan"}, "no optimizer 'Adan'"),
        ({"master_dtype": torch.float32}, "only Zero1 keeps master weights"),
        ({"ranks": [9]}, "rank 9 is outside a mesh of 2 ranks"),
        ({"plan": "auto", "parallelize": len}, "two ways to cut"),
        ({"sequence_parallel": True}, "sequence_parallel can only be given with a plan"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tpcore.explain(FACTORIES["net"], tp=2, **options)


# -- a Hugging Face config, and the command line ---------------------------------------------------------

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForPreTraining"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 101,
    "max_position_embeddings": 32,
}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_config_of_3_gb_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 3 << 30)
    found = CliRunner().invoke(app, ["explain", str(tmp_path), "--tp", "2"])
    assert found.exit_code == 2
    (line,) = found.output.splitlines()
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


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "ViTForImageClassification"])
def test_a_model_class_that_nobody_has_cut(name: str) -> None:
    program = tpcore.explain(name, tp=2, seq_len=8).program(0)
    assert not any(p.cut for p in program.parameters)
    assert not program.collectives
    assert all(p.gradient for p in program.parameters)


@pytest.mark.parametrize("name", ["llama", "t5", "vit", "mixtral"])
def test_a_model_of_transformers_by_its_own_plan(name: str, tmp_path: Path) -> None:
    """Each rank's parameters and collectives are those of tpcore.parallelize."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", {**sizes, "num_key_value_heads": 1, "vocab_size": 99}),
        "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
        "vit": ("ViTForImageClassification", {**sizes, "image_size": 32, "patch_size": 8}),
        "mixtral": ("MixtralForCausalLM", {**sizes, "num_key_value_heads": 2, "num_local_experts": 4}),
    }
    kind, config = configs[name]
    given = {"model_type": name, "architectures": [kind], **config}
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = tpcore.explain(str(tmp_path), tp=2, seq_len=8, plan="auto")
    assert found.disagreement is None
    assert found.mistakes == ()
    program = found.program(1)
    assert sum(p.nbytes for p in program.parameters if p.cut) > sum(p.nbytes for p in program.parameters if not p.cut)
    if name == "mixtral":
        ways = {"dispatch": "auto", "capacity_factor": 0.5}
        sent = tpcore.explain(str(tmp_path), ep=2, seq_len=8, plan="auto", **ways).program(1)
        assert dict(sent.routes)["model.layers.0.mlp.experts"].startswith("all_to_all: all-to-all sends 1,120 bytes")
        assert {c.op for c in sent.collectives if "experts" in c.module} == {"all_to_all dim 0 to 0"}
        first = sum(c.sent for c in sent.collectives if c.phase == "forward" and "layers.0.mlp.experts" in c.module)
        assert first == 1120  # 4 of 8 tokens: 32 numbers there and back, 2 numbers of experts and 2 weights there
        code, out = invoke(str(tmp_path), "--ep", "2", "--seq-len", "8", "--plan", "auto", "--dispatch", "all_to_all")
        assert code == 0
        assert "model.layers.*.mlp.experts: all_to_all: all-to-all sends" in out
    if name == "llama":
        # the embedding, then two in each layer; the loss of a cut vocabulary: three numbers of each token
        forward = [c for c in program.collectives if c.phase == "forward"]
        assert [c.module.rpartition(".")[2] for c in forward[:5]] == ["embed_tokens", *["o_proj", "down_proj"] * 2]
        assert all(c.nbytes < 100 for c in forward[5:])
        spread = tpcore.explain(str(tmp_path), tp=2, seq_len=8, plan="auto", sequence_parallel=True).program(0)
        assert "reduce_scatter" in " ".join(c.op for c in spread.collectives)


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


def test_the_command_prints_tables(bert: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    cut = (str(bert), "--tp", "2", "--dp", "2", "--seq-len", "8", "--parallelize", SHARD_BERT)
    code, out = invoke(*cut, "--plot", str(picture))
    assert code == 0, out
    lines = [line.split() for line in out.splitlines()]
    assert "BertForPreTraining on pp=1, dp=2, tp=2: ranks 0, 1, 2, 3 alike" in out
    program = tpcore.explain(str(bert), tp=2, dp=2, seq_len=8, parallelize=SHARD_BERT).program(0)
    total = sum(p.nbytes for p in program.parameters)
    assert ["all", f"{total // 4:,}", *size(total).split()] in [line[:4] for line in lines]
    assert "bert.encoder.layer.*.attention.output.dense" in out
    assert "Held in full by each of the 2 tp ranks:" in out
    assert ["forward,", "tp", "of", "2"] in lines
    sites = [line for line in out.splitlines() if re.search(r"\.py:\d+", line)]
    assert sites  # no terminal: lines are whole, however long
    assert all(line.startswith("    ") for line in sites)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_says_what_nobody_has_cut(bert: Path) -> None:
    code, out = invoke(str(bert), "--tp", "2", "--seq-len", "8")
    assert code == 0
    assert "No parameter of BertForPreTraining is cut: each of the 2 tp ranks holds the whole model" in out
    assert "No collectives." in out


def test_the_command_prints_json(bert: Path) -> None:
    code, out = invoke(str(bert), "--tp", "2", "--parallelize", SHARD_BERT, "--seq-len", "8", "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["mesh"], told["disagreement"]) == ({"pp": 1, "dp": 1, "tp": 2}, None)
    (program,) = told["programs"]
    assert program["ranks"] == [0, 1]
    fields = "phase axes size op shape dtype nbytes module site sent"
    assert set(program["collectives"][0]) == set(fields.split())


PLANTED = """
import tpcore
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = tpcore.RowParallelLinear(8, 8)

    def forward(self, x):
        y = self.proj(x)
        if tpcore.current().rank == 0:
            tpcore.comm.mappings.reduce(y.mean().reshape(1), self.proj.tp)  # a log line
        return y

def build():
    return Model()
"""


def test_the_command_ends_with_1_where_ranks_would_hang(tmp_path: Path) -> None:
    (tmp_path / "planted_model.py").write_text(PLANTED)
    done = forked.run(["tpcore", "explain", "planted_model.py:build", "--tp", "2"], tmp_path)
    assert done.returncode == 1, done.stderr
    assert "disagree on collective #1 of the group" in done.stderr
    assert re.search(
        r"rank 0: all_reduce sum of float32 \[1\], forward in module Model at \S+planted_model.py:13 in", done.stderr
    )
    assert "rank 0\n" in done.stdout  # each of the two programs is shown
    assert "rank 1\n" in done.stdout


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


def test_names_of_layers_and_sizes() -> None:
    assert pattern("encoder.layer.11.mlp1.0") == "encoder.layer.*.mlp1.*"
    assert [size(n) for n in (0, 999, 1000, 123456, 1.5e12)] == ["0 B", "999 B", "1 kB", "123 kB", "1.5 TB"]
    calls = tpcore.explain(FACTORIES["net"], tp=2).program(0).collectives
    assert sum(k.times for k in kinds(calls)) == len(calls)
    assert "blocks.*.down" in {k.module for k in kinds(calls)}
