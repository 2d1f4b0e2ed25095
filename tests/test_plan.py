"""``tpcore plan``: what it predicts from a few recorded layers is what all layers hold, compute and send."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import tpcore
from tpcore.cli.app import app
from tpcore.diagnose.explain import explain
from tpcore.diagnose.plan.choice import Choice
from tpcore.diagnose.plan.machine import Link, Machine
from tpcore.diagnose.plan.meter import ATTENTION
from tpcore.diagnose.plan.peak import memory_of
from tpcore.diagnose.plan.predict import Prediction, held_by_rank, predict
from tpcore.diagnose.plan.published import find
from tpcore.diagnose.plan.reduced import Reduced, Ways
from tpcore.diagnose.plan.script import setup_lines, step_lines
from tpcore.diagnose.plan.search import plan

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA |= {"vocab_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 64}
SEQ = 16


def folder(where: Path, kind: str = "llama", **options: Any) -> str:
    """The directory of a configuration."""
    names = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
    config = {"model_type": kind, "architectures": [names[kind]], **LLAMA, **options}
    (where / "config.json").write_text(json.dumps(config))
    return str(where)


def machine(**fields: Any) -> Machine:
    """One whose figures make every sum easy: a FLOP, a byte and a step of a collective take a second each."""
    names = ("per_host", "memory", "flops", "memory_bandwidth", "overhead", "inside", "between")
    unit = Link(1.0, 1.0)
    simple = Machine("unit", 8, 1, 10**12, {"float32": ((1.0, 1.0),)}, 1e30, 0.0, unit, unit, dict.fromkeys(names, ""))
    return replace(simple, **{"attention": 1.0, **fields})


def everything(model: Reduced, ways: Ways, batch: int, field: str, phases: tuple[str, ...]) -> float:
    """FLOPs or bytes of all layers' operators."""
    costs, found = model.costs(ways, batch), 0.0
    counts = Counter(model.order)
    for (phase, region), part in costs.parts.items():
        if phase in phases:
            found += counts.get(region, 1) * sum(o.times * getattr(o, field) for o in part.operators)
    return found


def test_flops_are_those_of_the_real_model(tmp_path: Path) -> None:
    reduced = Reduced(folder(tmp_path), SEQ, torch.float32)
    assert reduced.order == ["model.layers.0"] * 3 + ["model.layers.1"]
    assert reduced.alike
    costs = reduced.costs(Ways(), 3)
    counts = Counter(reduced.order)
    matmuls = sum(
        counts.get(region, 1) * o.times * o.flops
        for (_, region), part in costs.parts.items()
        for o in part.operators
        if o.name != "attention"
    )
    model = hf.llama(**LLAMA, attn_implementation="sdpa")
    ids = torch.zeros(3, SEQ, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:  # it knows no FLOPs of the CPU's fused attention
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert matmuls == counter.get_total_flops()


def test_a_ring_shares_the_attention_of_one_rank(tmp_path: Path) -> None:
    reduced = Reduced(folder(tmp_path), SEQ, torch.float32)

    def attention(ways: Ways, phase: str) -> float:
        parts = reduced.costs(ways, 2).parts.items()
        return sum(
            o.times * o.flops for (p, _), part in parts if p == phase for o in part.operators if o.name == ATTENTION
        )

    ring = Ways(cp=2, context_parallel="ring")
    for phase in ("forward", "backward"):
        assert 0 < attention(ring, phase) == attention(Ways(), phase) / 2  # in zig-zag order causal work is even


@pytest.mark.parametrize(
    "ways", [Ways(tp=2), Ways(tp=2, sequence_parallel=True), Ways(tp=4), Ways(tp=2, cp=2)], ids=str
)
def test_parameters_and_collectives_are_those_of_all_layers(tmp_path: Path, ways: Ways) -> None:
    where = folder(tmp_path)
    reduced = Reduced(where, SEQ, torch.float32)
    options = {"sequence_parallel": ways.sequence_parallel}
    full = explain(where, tp=ways.tp, cp=ways.cp, batch_size=2, seq_len=SEQ, plan="auto", ranks=[0], **options)
    program = full.program(0)
    held = sum(held_by_rank(reduced, reduced.costs(ways, 2), Choice(ways)).values(), start=type_of_held())
    assert held.nbytes == sum(p.nbytes for p in program.parameters)
    assert held.gradient == sum(p.gradient for p in program.parameters)
    counts = Counter(reduced.order)
    sent = sum(
        counts.get(region, 1) * nbytes
        for (_, region), part in reduced.costs(ways, 2).parts.items()
        for _, nbytes in part.calls
    )
    passes = [c for c in program.collectives if c.phase in ("forward", "backward")]
    assert sent == sum(c.nbytes for c in passes)


def type_of_held() -> Any:
    from tpcore.diagnose.plan.costs import HeldBytes

    return HeldBytes()


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3"])
def test_a_batch_is_on_the_line_through_one_and_two(tmp_path: Path, kind: str) -> None:
    small = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    if kind == "deepseek_v3":
        small = {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        }
        small |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        small |= {"moe_intermediate_size": 32, "num_key_value_heads": 8}
    reduced = Reduced(folder(tmp_path, kind, **small), SEQ, torch.float32)
    assert len(set(reduced.order)) == (3 if kind == "deepseek_v3" else 2)  # the last one is apart
    line, recorded = reduced.costs(Ways(tp=2), 5), reduced._costs(Ways(tp=2), 5)
    for key, part in recorded.parts.items():
        mine = line.parts[key]
        for field in ("flops", "nbytes"):
            wanted = sum(o.times * getattr(o, field) for o in part.operators)
            # bytes: one example alone has dims of 1, for which torch copies some small tensors and not others
            close = {"flops": 1e-9, "nbytes": 0.01}[field]
            assert sum(o.times * getattr(o, field) for o in mine.operators) == pytest.approx(wanted, rel=close)
        assert [n for _, n in mine.calls] == [n for _, n in part.calls]
        assert mine.delta == pytest.approx(part.delta)


@pytest.mark.parametrize("ways", [Ways(tp=2, sequence_parallel=True), Ways(ep=2)], ids=str)
def test_a_result_taken_again_is_what_the_operator_makes(tmp_path: Path, ways: Ways) -> None:
    """The second recording of the same model runs few operators, and finds the same costs and memory."""
    reduced = Reduced(folder(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2), SEQ, torch.float32)
    first, results = reduced._record(ways, 2, 1, None), len(reduced._results)
    assert reduced._record(ways, 2, 1, None).parts == first.parts
    assert len(reduced._results) == results < sum(len(part.operators) for part in first.parts.values())


def test_the_peak_of_all_layers_is_that_of_a_recorded_run(tmp_path: Path) -> None:
    """A model of which no layer is left out, metered whole."""
    where = folder(tmp_path)
    reduced, whole = Reduced(where, SEQ, torch.float32), Reduced(where, SEQ, torch.float32)
    config = transformers.AutoConfig.from_pretrained(where)
    config.use_cache = False
    with torch.device("meta"):
        whole._plain = transformers.LlamaForCausalLM(config)
    whole.order = [f"model.layers.{i}" for i in range(4)]
    whole._plain.set_attn_implementation("tpcore_recorded")
    recorded = whole._costs(Ways(), 2)
    held = peak = 0.0
    forward = [("forward", r) for r in ("before the layers", *whole.order, "after the layers")]
    backward = [("backward", r) for r in ("after the layers", *reversed(whole.order), "before the layers")]
    for phase, region in (*forward, *backward):
        part = recorded.part(phase, region)
        peak = max(peak, held + part.excess)
        held += part.delta
    choice = Choice(microbatch=2)
    costs = reduced.costs(Ways(), 2)
    memory = memory_of(reduced, costs, choice, held_by_rank(reduced, costs, choice))
    assert memory["gradients"] + memory["activations"] == pytest.approx(
        peak, rel=0.02
    )  # a few numbers of its bookkeeping


def test_each_layer_keeps_its_activations_or_with_recomputation_its_input(tmp_path: Path) -> None:
    kept = {}
    for count in (40, 80):  # so many that the peak is at the end of forward
        reduced = Reduced(folder(tmp_path, num_hidden_layers=count), SEQ, torch.float32)
        costs = reduced.costs(Ways(), 2)
        for recompute in (False, True):
            choice = Choice(microbatch=2, microbatches=2, recompute=recompute)
            kept[count, recompute] = memory_of(reduced, costs, choice, held_by_rank(reduced, costs, choice))[
                "activations"
            ]
    assert costs.hidden == 2 * SEQ * 64 * 4
    assert kept[80, False] - kept[40, False] == 40 * costs.part("forward", "model.layers.0").delta
    assert kept[80, True] - kept[40, True] == 40 * costs.hidden


def test_sums_of_a_machine_of_ones(tmp_path: Path) -> None:
    """Where a FLOP takes a second and a byte none, a step takes as many seconds as it has FLOPs."""
    reduced = Reduced(folder(tmp_path), SEQ, torch.float32)
    one = predict(reduced, Choice(microbatch=2), machine())
    both = everything(reduced, Ways(), 2, "flops", ("forward", "backward"))
    assert one.step == pytest.approx(both)
    assert one.flops == pytest.approx(both)
    assert one.efficiency == pytest.approx(1.0)
    four = predict(reduced, Choice(microbatch=2, microbatches=3), machine())
    assert four.step == pytest.approx(3 * both)
    again = predict(reduced, Choice(microbatch=2, recompute=True), machine())
    counts = Counter(reduced.order)
    costs = reduced.costs(Ways(), 2)
    layers = sum(n * sum(o.flops * o.times for o in costs.part("forward", r).operators) for r, n in counts.items())
    assert again.seconds["recomputation"] == pytest.approx(layers)
    assert again.flops == one.flops  # what is computed again counts for nothing
    stages = predict(reduced, Choice(pp=2, microbatch=1, microbatches=4), machine(inside=Link(0.0, 1e30)))
    per_tick = (
        sum(
            n
            * sum(o.flops * o.times for o in reduced.costs(Ways(), 1).part(phase, r).operators)
            * (2 if phase == "forward" else 1)
            for r, n in counts.items()
            for phase in ("forward", "backward")
        )
        / 2
    )
    assert stages.seconds["idle stages"] == pytest.approx(per_tick)  # one tick of five: bubble (pp - 1) / (m + pp - 1)


def test_collectives_take_a_ring_of_the_right_link(tmp_path: Path) -> None:
    reduced = Reduced(folder(tmp_path), SEQ, torch.float32)
    free = {"float32": ((1.0, 1e30),)}
    choice = Choice(Ways(tp=2), dp=2, microbatch=1)
    near = predict(reduced, choice, machine(flops=free, inside=Link(0.0, 1.0), between=Link(0.0, 1e30)))
    far = predict(reduced, choice, machine(flops=free, per_host=2, inside=Link(0.0, 1e30), between=Link(0.0, 1.0)))
    held = sum(held_by_rank(reduced, reduced.costs(Ways(tp=2), 1), choice).values(), start=type_of_held())
    assert near.seconds["tp collectives"] > 0
    assert far.seconds["tp collectives"] == pytest.approx(0)
    assert far.seconds["gradients over data ranks"] == pytest.approx(
        held.gradient, rel=0.01
    )  # 2 (n - 1) / n of the bytes
    zero = predict(reduced, replace(choice, zero1=True), machine(flops=free, per_host=2, between=Link(0.0, 1.0)))
    assert zero.seconds["gradients over data ranks"] == pytest.approx(held.gradient, rel=0.01)
    assert zero.memory["optimizer"] == pytest.approx(near.memory["optimizer"] / 2, rel=0.01)


def test_every_plan_fits_and_the_fastest_is_first(tmp_path: Path) -> None:
    small = find("h100x8")
    found = plan(folder(tmp_path), machine=small, devices=8, batch=16, seq_len=SEQ, memory=2e6, scaling=True)
    assert found.rows
    for row in found.rows:
        assert row.choice.mesh.size == 8
        assert row.choice.batch == 16
        assert row.nbytes <= 2e6
    steps = [row.step for row in found.rows]
    assert steps == sorted(steps)
    assert found.best is found.rows[0]
    axes = [dict(row.choice.mesh.axes) for row in found.rows]
    assert {"pp": 4, "dp": 1, "ep": 1, "cp": 1, "tp": 2} in axes
    assert any("does not divide 4 layers" in why for why in found.refused)
    assert list(found.curve) == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    none = plan(folder(tmp_path), machine=small, devices=8, batch=16, seq_len=SEQ, memory=1e4)
    assert not none.rows
    with pytest.raises(ValueError, match=r"fits no mesh of 8 devices: more memory than a device has"):
        _ = none.best


def test_the_cache_of_served_tokens(tmp_path: Path) -> None:
    """Four layers, a key and a value of 4 heads of 8 numbers each; of fewer heads than ranks each rank has one."""
    reduced = Reduced(folder(tmp_path), SEQ, torch.float32)
    assert [reduced.cache(tp) for tp in (1, 2, 4, 8)] == [4 * 2 * heads * 8 * 4 for heads in (4, 2, 1, 1)]
    assert plan(folder(tmp_path), devices=1, batch=1, seq_len=SEQ).cache == 4 * 2 * 4 * 8 * 2


@pytest.mark.slow
def test_experts_have_their_axis(tmp_path: Path) -> None:
    where = folder(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    found = plan(where, devices=4, batch=8, seq_len=SEQ)
    assert any(row.choice.ways.ep == 4 for row in found.rows)
    assert any(row.choice.ways.expert_parallel for row in found.rows)


def test_a_rank_computes_its_share_of_the_choices(tmp_path: Path) -> None:
    where = folder(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    reduced = Reduced(where, SEQ, torch.float32)
    alone, shared = (
        sum(
            o.flops * o.times
            for o in reduced.costs(ways, 1).part("forward", "model.layers.0").operators
            if o.name == "grouped_mm"
        )
        for ways in (Ways(), Ways(ep=4))
    )
    assert alone == shared > 0  # four times the tokens, a quarter of the experts


def test_layers_that_are_not_alike_are_no_stages(tmp_path: Path) -> None:
    more = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    more |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    more |= {"moe_intermediate_size": 32, "num_key_value_heads": 8}
    found = plan(folder(tmp_path, "deepseek_v3", **more), devices=2, batch=2, seq_len=SEQ)
    assert all(row.choice.pp == 1 for row in found.rows)
    assert "pp: stages run one program, and the layers are not alike" in found.refused


def test_a_loss_of_routers_has_no_stages(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_key_value_heads": 8, "output_router_logits": True}
    found = plan(folder(tmp_path, "mixtral", **sizes), devices=2, batch=2, seq_len=SEQ)
    assert all(row.choice.pp == 1 for row in found.rows)
    assert "pp: stages have no loss of routers (output_router_logits)" in found.refused


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "batch must be 1 or more, not 0"),
        ({"batch": 1, "seq_len": 0}, "seq_len must be 1 or more, not 0"),
        ({"batch": 1, "machine": "h1000"}, "no machine 'h1000': it is neither a file nor one of trn1.32xlarge"),
        ({"batch": 1, "memory": -5.0}, "memory must be 1 or more, not -5.0"),
        ({"batch": 1, "per_host": 0, "devices": 2}, "per_host must be 1 or more, not 0"),
        ({"batch": 1, "hosts": 0}, "hosts must be 1 or more, not 0"),
    ],
)
def test_what_cannot_be_planned(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(folder(tmp_path), **{"seq_len": SEQ, **options})


# -- the lines that it prints --------------------------------------------------------------------------------
def trained(where: str, choice: Choice, seq_len: int) -> list[float]:
    """The losses of three steps by the lines of the plan, on every rank's part of one batch."""
    names: dict[str, Any] = {"torch": torch, "tpcore": tpcore, "lr": 1e-2}
    first, *others = setup_lines(choice, "float32")
    exec(first, names)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(where)
    config.use_cache = False
    names["model"] = getattr(transformers, config.architectures[0])(config)
    exec("\n".join(others), names)
    ctx = tpcore.current()
    rows = choice.microbatch * choice.microbatches
    ids = torch.randint(96, (choice.batch, seq_len), generator=torch.Generator().manual_seed(1))
    ids = ids[ctx.index(ctx.batch) * rows :][:rows]
    names["batch"] = {"input_ids": ids, "labels": ids}
    step, losses = "\n".join(step_lines(choice)), []
    parts = choice.microbatches if choice.pp == 1 else 1
    for _ in range(3):
        exec(step, names)
        loss = names["loss"].detach().reshape(1)  # of the last microbatch, a part of the mean
        losses.append(float(ctx.batch.all_reduce(loss)) / ctx.batch.size * parts)
    tpcore.shutdown()
    return losses


CHOICES = [
    Choice(Ways(tp=2, sequence_parallel=True), microbatch=4, recompute=True),
    Choice(Ways(cp=2, context_parallel="ring"), microbatch=4, zero1=True),
    Choice(pp=2, microbatch=1, microbatches=4),
    Choice(dp=2, microbatch=2, zero1=True, bucket_mb=16),
]


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_printed_lines_train_as_one_process(tmp_path: Path, choice: Choice) -> None:
    where = folder(tmp_path)
    found = tpcore.launch(trained, 2, args=(where, choice, SEQ))
    alone = tpcore.launch(trained, 1, args=(where, Choice(microbatch=4), SEQ))[0]
    for losses in found:
        assert losses == pytest.approx(alone, rel=1e-5)  # float32, in which the order of sums differs


# -- the command ---------------------------------------------------------------------------------------------
def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


@pytest.mark.slow
def test_the_command_shows_the_best_and_its_lines(tmp_path: Path) -> None:
    where = folder(tmp_path)
    shown = command(where, "--hosts", "2", "--batch", "64", "--seq-len", "16", "--plot", str(tmp_path / "plan.svg"))
    assert shown.exit_code == 0, shown.output
    assert "LlamaForCausalLM on 16 devices of h100x8, 80 GB each: 64 x 16 tokens a step, bfloat16." in shown.output
    assert "torchrun --nnodes 2 --nproc-per-node 8" in shown.output
    assert "tpcore.init(" in shown.output
    assert "Predicted from published figures, not measured" in shown.output
    assert (tmp_path / "plan.svg").stat().st_size > 10_000
    data = json.loads(command(where, "--devices", "2", "--batch", "4", "--seq-len", "16", "--json").output)
    assert data["devices"] == 2
    assert data["plans"][0]["mesh"]["tp"] * data["plans"][0]["mesh"]["dp"] * data["plans"][0]["mesh"]["pp"] in (1, 2)
    assert data["machine"]["source"]["flops"].startswith("NVIDIA H100")


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    nothing = command(folder(tmp_path), "--devices", "2", "--memory", "10KB", "--batch", "4", "--seq-len", "16")
    assert nothing.exit_code == 1
    assert "does not fit" in nothing.output
    assert "more memory than a device has for it" in nothing.output
    for words, text in (
        ((), "name a model, or give --calibrate or --simulate"),
        (("--simulate", "many"), "--simulate takes numbers with commas, as 0,3, not 'many'"),
        ((str(tmp_path), "--dtype", "int8"), "torch has no floating dtype 'int8'"),
        ((str(tmp_path), "--machine", "abacus"), "no machine 'abacus'"),
    ):
        failed = command(*words)
        assert failed.exit_code == 2
        assert text in failed.output


def test_the_command_simulates_large_jobs() -> None:
    shown = command("--simulate", "1000,10000")
    assert shown.exit_code == 0
    assert shown.output.count("Simulation, not a measurement") == 2
    assert "10,000 devices" in shown.output


def test_a_prediction_as_json_has_all_parts(tmp_path: Path) -> None:
    row: Prediction = plan(folder(tmp_path), devices=2, batch=4, seq_len=SEQ).best
    entry = row.to_json()
    assert sum(entry["memory"].values()) == row.nbytes
    assert sum(entry["seconds"].values()) == row.step
    assert entry["tokens_per_second"] == 4 * SEQ / row.step
