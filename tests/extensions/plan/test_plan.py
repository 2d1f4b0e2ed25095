"""``tpcore plan``: what it predicts from a few recorded layers is what all layers hold, compute and send."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import hf
from helpers.tiers import tiers
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import tpcore
from tpcore.cli.app import app
from tpcore_explain.explain import explain
from tpcore_plan.choice import Choice, setup_lines, step_lines
from tpcore_plan.costs import HeldBytes
from tpcore_plan.execution import Execution
from tpcore_plan.machine import Clock, Link, Machine
from tpcore_plan.meter import AFTER, ATTENTION
from tpcore_plan.predict import held_by_rank, memory_of, predict
from tpcore_plan.published import find
from tpcore_plan.reduced import Reduced, Ways
from tpcore_plan.search import plan

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA |= {"vocab_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 64}
SEQ = 16
DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK |= {"moe_intermediate_size": 32, "num_key_value_heads": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
}


def folder(where: Path, kind: str = "llama", **options: Any) -> str:
    """The directory of a configuration."""
    architecture, own = KINDS[kind]
    return hf.folder(where, architecture, **{**LLAMA, **own, **options})


def machine(**fields: Any) -> Machine:
    """One whose figures make every sum easy: a FLOP, a byte and a step of a collective take a second each."""
    names = ("per_host", "memory", "flops", "memory_bandwidth", "overhead", "inside", "between")
    unit = Link(1.0, 1.0)
    simple = Machine("unit", 8, 1, 10**12, {"float32": ((1.0, 1.0),)}, 1e30, 0.0, unit, unit, dict.fromkeys(names, ""))
    return replace(simple, **{"attention": 1.0, **fields})


def reduced(where: Path, kind: str = "llama", **options: Any) -> Reduced:
    return Reduced(folder(where, kind, **options), SEQ, torch.float32)


def flops(
    model: Reduced, ways: Ways, batch: int, phases: tuple[str, ...] = ("forward", "backward"), attention: bool = True
) -> float:
    """Of all layers' operators, with or without those of fused ``attention``."""
    counts, found = Counter(model.order), 0.0
    for (phase, region), part in model.costs(ways, batch).parts.items():
        if phase in phases:
            found += counts.get(region, 1) * sum(
                o.times * o.flops for o in part.operators if attention or o.name != ATTENTION
            )
    return found


def held(model: Reduced, choice: Choice) -> HeldBytes:
    costs = model.costs(choice.ways, choice.microbatch)
    return sum(held_by_rank(model, costs, choice).values(), HeldBytes())


def memory(model: Reduced, choice: Choice) -> dict[str, float]:
    costs = model.costs(choice.ways, choice.microbatch)
    return memory_of(model, costs, choice, held_by_rank(model, costs, choice))


def test_flops_are_those_of_the_real_model(tmp_path: Path) -> None:
    few = reduced(tmp_path)
    assert few.order == ["model.layers.0"] * 3 + ["model.layers.1"]
    assert few.alike
    model = hf.llama(**LLAMA, attn_implementation="sdpa")
    ids = torch.zeros(3, SEQ, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counts = counter.get_flop_counts()["Global"].items()  # of the CPU's fused attention since torch 2.15 alone
    assert flops(few, Ways(), 3, attention=False) == sum(n for op, n in counts if "attention" not in str(op))


def test_a_ring_shares_the_attention_of_one_rank(tmp_path: Path) -> None:
    few = reduced(tmp_path)
    for phases in (("forward",), ("backward",)):
        ring, alone = (
            flops(few, ways, 2, phases) - flops(few, ways, 2, phases, attention=False)
            for ways in (Ways(cp=2, context_parallel="ring"), Ways())
        )
        assert 0 < ring == alone / 2  # in zig-zag order causal work is even


@pytest.mark.parametrize(
    "ways", [Ways(tp=2), Ways(tp=2, sequence_parallel=True), Ways(tp=4), Ways(tp=2, cp=2)], ids=str
)
def test_parameters_and_collectives_are_those_of_all_layers(tmp_path: Path, ways: Ways) -> None:
    few, options = reduced(tmp_path), {"sequence_parallel": ways.sequence_parallel}
    full = explain(str(tmp_path), tp=ways.tp, cp=ways.cp, batch_size=2, seq_len=SEQ, plan="auto", ranks=[0], **options)
    program, here = full.program(0), held(few, Choice(ways, microbatch=2))
    assert here.nbytes == sum(p.nbytes for p in program.parameters)
    assert here.gradient == sum(p.gradient for p in program.parameters)
    counts, parts = Counter(few.order), few.costs(ways, 2).parts.items()
    sent = sum(counts.get(region, 1) * nbytes for (_, region), part in parts for _, nbytes in part.calls)
    assert sent == sum(c.nbytes for c in program.collectives if c.phase in ("forward", "backward"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_on_the_line_through_one_and_two(tmp_path: Path, kind: str) -> None:
    few = reduced(tmp_path, kind)
    assert len(set(few.order)) == (3 if kind == "deepseek_v3" else 2)  # the last one is apart
    line, recorded = few.costs(Ways(tp=2), 5), few._costs(Ways(tp=2), 5)
    for key, part in recorded.parts.items():
        mine = line.parts[key]
        # bytes: one example alone has dims of 1, for which torch copies some small tensors and not others
        for field, close in (("flops", 1e-9), ("nbytes", 0.01)):
            got, wanted = (sum(o.times * getattr(o, field) for o in one.operators) for one in (mine, part))
            assert got == pytest.approx(wanted, rel=close)
        assert [n for _, n in mine.calls] == [n for _, n in part.calls]
        assert mine.delta == pytest.approx(part.delta)


@pytest.mark.parametrize("ways", [Ways(tp=2, sequence_parallel=True), Ways(ep=2)], ids=str)
def test_a_result_taken_again_is_what_the_operator_makes(tmp_path: Path, ways: Ways) -> None:
    """The second recording of the same model runs few operators, and finds the same costs and memory."""
    few = reduced(tmp_path, "mixtral")
    first, results = few._record(ways, 2, 1, None), len(few._results)
    assert few._record(ways, 2, 1, None).parts == first.parts
    assert len(few._results) == results < sum(len(part.operators) for part in first.parts.values())


def test_the_peak_of_all_layers_is_that_of_a_recorded_run(tmp_path: Path) -> None:
    """A model of which no layer is left out, metered whole."""
    few, whole = reduced(tmp_path), reduced(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.use_cache = False
    with torch.device("meta"):
        whole._plain = transformers.LlamaForCausalLM(config)
    whole.order = [f"model.layers.{i}" for i in range(4)]
    whole._plain.set_attn_implementation("tpcore_recorded")
    recorded, live, peak = whole._costs(Ways(), 2), 0.0, 0.0
    regions = ["before the layers", *whole.order, "after the layers"]
    for phase, region in (*(("forward", r) for r in regions), *(("backward", r) for r in reversed(regions))):
        part = recorded.part(phase, region)
        peak = max(peak, live + part.excess)
        live += part.delta
    found = memory(few, Choice(microbatch=2))
    # but for a few numbers of its bookkeeping
    assert found["gradients"] + found["activations"] == pytest.approx(peak, rel=0.02)


def test_each_layer_keeps_its_activations_or_with_recomputation_its_input(tmp_path: Path) -> None:
    kept = {}
    for count in (40, 80):  # so many that the peak is at the end of forward
        few = reduced(tmp_path, num_hidden_layers=count)
        for recompute in (False, True):
            choice = Choice(microbatch=2, microbatches=2, recompute=recompute)
            kept[count, recompute] = memory(few, choice)["activations"]
    costs = few.costs(Ways(), 2)
    assert costs.hidden == 2 * SEQ * 64 * 4
    assert kept[80, False] - kept[40, False] == 40 * costs.part("forward", "model.layers.0").delta
    assert kept[80, True] - kept[40, True] == 40 * costs.hidden


def test_sums_of_a_machine_of_ones(tmp_path: Path) -> None:
    """Where a FLOP takes a second and a byte none, a step takes as many seconds as it has FLOPs."""
    few = reduced(tmp_path)
    one = predict(few, Choice(microbatch=2), machine())
    both = flops(few, Ways(), 2)
    assert one.step == pytest.approx(both)
    assert one.flops == pytest.approx(both)
    assert one.efficiency == pytest.approx(1.0)
    three = predict(few, Choice(microbatch=2, microbatches=3), machine())
    assert three.step == pytest.approx(3 * both)

    def layers(batch: int, phase: str) -> float:
        parts = ((n, few.costs(Ways(), batch).part(phase, r)) for r, n in Counter(few.order).items())
        return sum(n * sum(o.flops * o.times for o in part.operators) for n, part in parts)

    again = predict(few, Choice(microbatch=2, recompute=True), machine())
    assert again.seconds["recomputation"] == pytest.approx(layers(2, "forward"))
    assert again.flops == one.flops  # what is computed again counts for nothing
    stages = predict(few, Choice(pp=2, microbatch=1, microbatches=4), machine(inside=Link(0.0, 1e30)))
    per_tick = (2 * layers(1, "forward") + layers(1, "backward")) / 2
    assert stages.seconds["idle stages"] == pytest.approx(per_tick)  # one tick of five: bubble (pp - 1) / (m + pp - 1)


def test_collectives_take_a_ring_of_the_right_link(tmp_path: Path) -> None:
    few, choice = reduced(tmp_path), Choice(Ways(tp=2), dp=2, microbatch=1)
    free = {"float32": ((1.0, 1e30),)}
    near = predict(few, choice, machine(flops=free, inside=Link(0.0, 1.0), between=Link(0.0, 1e30)))
    far = predict(few, choice, machine(flops=free, per_host=2, inside=Link(0.0, 1e30), between=Link(0.0, 1.0)))
    zero = predict(few, replace(choice, zero1=True), machine(flops=free, per_host=2, between=Link(0.0, 1.0)))
    assert near.seconds["tp collectives"] > 0
    assert far.seconds["tp collectives"] == pytest.approx(0)
    for found in (far, zero):  # 2 (n - 1) / n of the bytes
        assert found.seconds["gradients over data ranks"] == pytest.approx(held(few, choice).gradient, rel=0.01)
    assert zero.memory["optimizer"] == pytest.approx(near.memory["optimizer"] / 2, rel=0.01)


def test_every_plan_fits_and_the_fastest_is_first(tmp_path: Path) -> None:
    small = find("h100x8")
    found = plan(folder(tmp_path), machine=small, devices=8, batch=16, seq_len=SEQ, memory=2e6)
    assert found.rows
    for row in found.rows:
        assert row.choice.mesh.size == 8
        assert row.choice.batch == 16
        assert row.nbytes <= 2e6
    steps = [row.step for row in found.rows]
    assert steps == sorted(steps)
    assert found.best is found.rows[0]
    entry = found.best.to_json()
    assert sum(entry["memory"].values()) == found.best.nbytes
    assert sum(entry["seconds"].values()) == found.best.step
    assert entry["tokens_per_second"] == 16 * SEQ / found.best.step
    axes = [dict(row.choice.mesh.axes) for row in found.rows]
    assert {"pp": 4, "dp": 1, "ep": 1, "cp": 1, "tp": 2} in axes
    assert any("does not divide 4 layers" in why for why in found.refused)
    none = plan(folder(tmp_path), machine=small, devices=8, batch=16, seq_len=SEQ, memory=1e4)
    assert not none.rows
    with pytest.raises(ValueError, match=r"fits no mesh of 8 devices: more memory than a device has"):
        _ = none.best


def test_an_execution_of_another_program(tmp_path: Path) -> None:
    """What it recomputes, how long its stages wait, and what its collectives add beside compute."""
    few, free = reduced(tmp_path), machine(inside=Link(0.0, 1e30), between=Link(0.0, 1e30))
    forward, both = flops(few, Ways(), 1, ("forward",)), flops(few, Ways(), 1)

    def parts(choice: Choice, on: Machine = free, **options: Any) -> dict[str, float]:
        return dict(predict(few, replace(choice, execution=Execution(**options)), on).seconds)

    head = parts(Choice())["embedding and loss"]
    stages = Choice(pp=2, microbatches=4)
    for interleaved, idle in ((1, 1.0), (2, 0.5)):
        found = parts(stages, interleaved=interleaved)
        assert found["layers"] + found["embedding and loss"] == pytest.approx(4 * ((both - head) / 2 + head))
        assert found["idle stages"] == pytest.approx(idle * (both - head) / 2)
    layers = forward - sum(o.flops * o.times for o in few.costs(Ways(), 1).part("forward", AFTER).operators)
    attention = flops(few, Ways(), 1, ("forward",)) - flops(few, Ways(), 1, ("forward",), attention=False)
    half = (layers - attention) / 2
    for recompute, again in (("nothing", 0.0), ("attention", 0.0), ("half", half), ("layers", layers)):
        assert parts(Choice(), recompute=recompute).get("recomputation", 0.0) == pytest.approx(again)
    scores = parts(Choice(), recompute="attention", scores=True)["recomputation"]
    assert scores == pytest.approx(2 * attention, rel=1e-6)  # the hidden half too
    wide, slow = Choice(Ways(tp=2)), machine(inside=Link(0.0, 1.0), beside=0.25)
    alone, beside = (parts(wide, slow, overlap=axes)["tp collectives"] for axes in ((), ("tp",)))
    assert 0 < beside < alone
    assert beside == pytest.approx(alone / 4)  # all of it is beside compute, which is longer
    nbytes, link = few.costs(Ways(), 1).held, machine(inside=Link(0.0, 1e30), between=Link(0.0, 1.0))
    sharded = parts(Choice(dp=16), replace(link, per_host=1), sharded=True)["dp parameters and gradients"]
    assert sharded == pytest.approx(
        sum(_count(few, r) * 3 * h.nbytes * 15 / 16 for (r, _), h in nbytes.items()), rel=0.01
    )
    end = parts(Choice(dp=2), replace(link, per_host=1))
    assert end["gradients over data ranks"] == pytest.approx(held(few, Choice(dp=2)).gradient, rel=0.01)
    assert end["optimizer"] > 0
    spread = memory(few, Choice(dp=16, zero1=True, execution=Execution(sharded=True)))
    assert spread["parameters"] < memory(few, Choice(dp=16, zero1=True))["parameters"]


def _count(few: Reduced, region: str) -> int:
    return max(few.order.count(region), 1)


def test_ranks_of_a_group_on_one_host_share_what_leads_out_of_it() -> None:
    apart = machine(per_host=8, inside=Link(0.0, 100.0), between=Link(0.0, 1.0))
    for ways, dp, shared in ((Ways(tp=8), 4, 1), (Ways(tp=2), 16, 4), (Ways(), 32, 8)):
        took = Clock(apart, Choice(ways, dp=dp), "float32").collective("all_gather", ("dp",), 100.0, dp)
        assert took == pytest.approx((dp - 1) * 100 / shared)


def test_a_narrow_matmul_has_the_rate_of_a_small_square_one() -> None:
    few = machine(flops={"float32": ((2.0 * 32**3, 1.0), (2.0 * 1024**3, 100.0))})
    clock = Clock(few, Choice(), "float32")
    square, narrow = (
        clock.operator("mm", 2.0 * m * n * k, 4.0 * (m * n + n * k + m * k)) / (m * n * k)
        for m, n, k in ((256, 256, 256), (4096, 256, 16))
    )
    assert square == pytest.approx(2 / few.rate("float32", 2.0 * 256**3))
    assert narrow > 2 * square


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"interleaved": 0}, "interleaved must be a whole number above 0, not 0"),
        ({"recompute": "all"}, "recompute must be one of nothing, attention, half, layers, not 'all'"),
        ({"overlap": ("dp", "sp")}, "overlap must be of the axes dp, ep, cp, tp, pp, not 'sp'"),
    ],
)
def test_what_no_execution_is(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Execution(**options)


def test_the_cache_of_served_tokens(tmp_path: Path) -> None:
    """Four layers, a key and a value of 4 heads of 8 numbers each; of fewer heads than ranks each rank has one."""
    few = reduced(tmp_path)
    assert [few.cache(tp) for tp in (1, 2, 4, 8)] == [4 * 2 * heads * 8 * 4 for heads in (4, 2, 1, 1)]
    assert plan(str(tmp_path), devices=1, batch=1, seq_len=SEQ).cache == 4 * 2 * 4 * 8 * 2


@pytest.mark.slow
def test_experts_have_their_axis(tmp_path: Path) -> None:
    found = plan(folder(tmp_path, "mixtral"), devices=4, batch=8, seq_len=SEQ)
    assert any(row.choice.ways.ep == 4 for row in found.rows)
    assert any(row.choice.ways.expert_parallel for row in found.rows)


def test_a_rank_computes_its_share_of_the_choices(tmp_path: Path) -> None:
    few = reduced(tmp_path, "mixtral")
    parts = (few.costs(ways, 1).part("forward", "model.layers.0") for ways in (Ways(), Ways(ep=4)))
    alone, shared = (sum(o.flops * o.times for o in part.operators if o.name == "grouped_mm") for part in parts)
    assert alone == shared > 0  # four times the tokens, a quarter of the experts


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("deepseek_v3", {}, "pp: stages run one program, and the layers are not alike"),
        ("mixtral", {"output_router_logits": True}, "pp: stages have no loss of routers (output_router_logits)"),
    ],
)
def test_what_has_no_stages(tmp_path: Path, kind: str, options: dict[str, Any], why: str) -> None:
    found = plan(folder(tmp_path, kind, **options), devices=2, batch=2, seq_len=SEQ)
    assert all(row.choice.pp == 1 for row in found.rows)
    assert why in found.refused


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "batch must be 1 or more, not 0"),
        ({"batch": 1, "seq_len": 0}, "seq_len must be 1 or more, not 0"),
        ({"batch": 1, "memory": -5.0}, "memory must be 1 or more, not -5.0"),
        ({"batch": 1, "per_host": 0, "devices": 2}, "per_host must be 1 or more, not 0"),
        ({"batch": 1, "hosts": 0}, "hosts must be 1 or more, not 0"),
    ],
)
def test_what_cannot_be_planned(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(folder(tmp_path), **{"seq_len": SEQ, **options})
    with pytest.raises(ValueError, match="3 key/value heads do not divide 8 heads"):
        plan(folder(tmp_path, num_key_value_heads=3), devices=1, batch=1, seq_len=SEQ)


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


@pytest.mark.parametrize("choice", tiers((), CHOICES[::2], CHOICES), ids=str)
def test_the_printed_lines_train_as_one_process(tmp_path: Path, choice: Choice) -> None:
    where = folder(tmp_path)
    alone = trained(where, Choice(microbatch=4), SEQ)
    found = tpcore.launch(trained, 2, args=(where, choice, SEQ))
    for losses in found:
        assert losses == pytest.approx(alone, rel=1e-5)  # float32, in which the order of sums differs


# -- the command ---------------------------------------------------------------------------------------------
def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def test_the_command_takes_another_programs_execution(tmp_path: Path) -> None:
    words = folder(tmp_path), "--devices", "2", "--batch", "4", "--seq-len", "16"
    others = "--interleaved", "2", "--recompute", "half", "--overlap", "dp, tp", "--fused", "--fsdp"
    data = json.loads(command(*words, *others, "--json").output)
    how = {"interleaved": 2, "recompute": "half", "overlap": ["dp", "tp"], "fused": True, "sharded": True}
    assert {json.dumps(row["execution"]) for row in data["plans"]} == {json.dumps({**how, "scores": False})}
    meshes = {tuple(row["mesh"].items()) for row in data["plans"]}
    assert len(meshes) == 3  # dp, tp and pp
    shown = command(*words, *others).output
    assert "tpcore.init" not in shown  # the program would be another one


@pytest.mark.slow
def test_the_command_shows_the_best_and_its_lines(tmp_path: Path) -> None:
    where = folder(tmp_path)
    shown = command(where, "--hosts", "2", "--batch", "64", "--seq-len", "16", "--plot", str(tmp_path / "plan.svg"))
    assert shown.exit_code == 0, shown.output
    assert "LlamaForCausalLM on 16 devices of h100x8, 80 GB each: 64 x 16 tokens a step, bfloat16." in shown.output
    assert "torchrun --nnodes 2 --nproc-per-node 8" in shown.output
    assert "tpcore.init(" in shown.output
    assert "Predicted from published figures, not measured" in shown.output
    assert f"saved as {tmp_path / 'plan.svg'}\n" in shown.stdout
    assert (tmp_path / "plan.svg").stat().st_size > 10_000
    data = json.loads(command(where, "--devices", "2", "--batch-size", "4", "--seq-len", "16", "--json").output)
    assert data["devices"] == 2
    assert data["plans"][0]["mesh"]["tp"] * data["plans"][0]["mesh"]["dp"] * data["plans"][0]["mesh"]["pp"] in (1, 2)
    assert data["machine"]["source"]["flops"].startswith("NVIDIA H100")


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    nothing = command(folder(tmp_path), "--devices", "2", "--memory", "10KB", "--batch", "4", "--seq-len", "16")
    assert nothing.exit_code == 1
    assert "does not fit" in nothing.output
    assert "more memory than a device has for it" in nothing.output
    for words, text in (
        ((str(tmp_path), "--dtype", "int8"), "torch has no floating dtype 'int8'"),
        ((str(tmp_path), "--machine", "abacus"), "no machine 'abacus'"),
        ((str(tmp_path), "--memory", "80"), "--memory 80: a size such as 5GB"),
        ((str(tmp_path), "--overlap", "dp,sp"), "overlap must be of the axes dp, ep, cp, tp, pp, not 'sp'"),
    ):
        failed = command(*words)
        assert failed.exit_code == 2
        assert text in failed.output
