"""A model of transformers, cut by its plan: equal to the whole, or one error that names what does not fit."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from helpers import families, hf
from helpers.counting import counted
from helpers.hf import GPT2, NO_DROPOUT, TINY, assert_equals_whole, llama, mixtral, phi3, recomputed, text
from helpers.worlds import each_rank
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tpcore
from tpcore import Block, Mesh
from tpcore.testing import run_ranks
from tpcore_hf.plan.found import found
from tpcore_hf.plan.model import rules_of

TWO = Mesh({"tp": 2})
QWEN3 = {**TINY, "num_key_value_heads": 2, "head_dim": 8}


def gpt_neox() -> Any:
    config = transformers.GPTNeoXConfig(**TINY, hidden_dropout=0.0, attention_dropout=0.0)
    return transformers.GPTNeoXForCausalLM(config)


MODELS = {
    "llama": llama,
    "llama, one key head, tied, biases": lambda: llama(
        num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen3, normed heads": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3)),
    "gemma3, scaled table": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**QWEN3)),
    "gpt_neox, q|k|v by heads": gpt_neox,
    "phi3, q|k|v and gate|up": phi3,
    "bert, no plan of its own": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**{**TINY, **NO_DROPOUT})),
    "gpt2, q|k|v in Conv1D": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
}

ROUNDS = 1e-6
"""Norms of transformers compute in float32: what they round differs with the order of sums."""
TOLERANCE = dict.fromkeys(("qwen3, normed heads", "gemma3, scaled table"), ROUNDS)
SPREAD = {**TOLERANCE, "llama": ROUNDS, "llama, one key head, tied, biases": ROUNDS}
SPREAD["phi3, q|k|v and gate|up"] = ROUNDS


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "tokens"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_whole_model(name: str, sequence_parallel: bool) -> None:
    assert_equals_whole(
        MODELS[name],
        sequence_parallel=sequence_parallel,
        tolerance=(SPREAD if sequence_parallel else TOLERANCE).get(name, 1e-12),
    )


@each_rank(tp=2)
def test_an_attention_that_reads_the_configuration_has_its_own_heads(ctx: tpcore.ParallelContext) -> None:
    model: Any = tpcore.parallelize(phi3())
    inner = model.model.layers[0].self_attn
    assert inner.config.num_attention_heads == 2
    assert model.config.num_attention_heads == 4
    model.set_attn_implementation("eager")
    assert inner.config._attn_implementation == "eager"
    assert not hasattr(inner.config, "of_no_model")


def test_a_kernel_of_the_attention_interface_gets_a_ranks_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """tpcore has no attention of its own without context parallelism: it calls the function that is chosen."""
    kernels, heads = ALL_ATTENTION_FUNCTIONS, set()
    sdpa = kernels["sdpa"]

    def kernel(module: Any, q: Any, k: Any, *args: Any, **options: Any) -> Any:
        heads.add((q.shape[1], k.shape[1]))
        return sdpa(module, q, k, *args, **options)

    monkeypatch.setitem(kernels, "sdpa", kernel)
    assert_equals_whole(llama, (2,))
    assert heads == {(4, 2), (2, 1)}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "tokens"])
def test_activation_checkpointing(sequence_parallel: bool) -> None:
    assert_equals_whole(llama, (2,), run=recomputed, tolerance=ROUNDS, sequence_parallel=sequence_parallel)


def test_gradients_accumulate() -> None:
    """A norm of heads sees a part of its gradient on each rank: what is summed must not be summed again."""

    def run(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        model(**batch).loss.backward()
        return hf.step(model, batch)

    assert_equals_whole(MODELS["qwen3, normed heads"], (2,), run=run, tolerance=ROUNDS)


@pytest.mark.parametrize("name", ["qwen3, normed heads", "phi3, q|k|v and gate|up"])
def test_a_copied_model_is_its_own(name: str) -> None:
    def run(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        twin = copy.deepcopy(model)
        for p in model.parameters():
            p.data = p.data * 2
        got = hf.step(twin, batch)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad
        return got

    assert_equals_whole(MODELS[name], (2,), run=run, tolerance=ROUNDS, sequence_parallel=True)


def calls(make: Any = llama, **options: Any) -> dict[str, int]:
    """Collectives of one step of a model of two layers, by name, on rank 0."""

    _, of_ranks = counted(TWO, lambda ctx: tpcore.parallelize(make(), **options).train()(**text()).loss.backward())
    return Counter(call.op.split()[0] for call in of_ranks[0])


def test_inputs_are_summed_once_for_all_that_read_them() -> None:
    # forward 2 a layer and the table; backward 2 a layer and the head; an exchange of the loss
    assert calls() == {"all_reduce": 10, "all_gather": 1}
    assert calls(phi3) == calls(), "nothing is gathered, though q|k|v and gate|up are one layer each"


def test_tokens_are_gathered_and_reduced_by_scattering() -> None:
    found = calls(sequence_parallel=True)
    assert found["reduce_scatter"] == 8  # attention and MLP of 2 layers, forward and backward
    # the same transposed, 8; tokens into the first block and out of the last one, 2; the loss
    assert found["all_gather"] == 11
    assert found["all_reduce"] == 6  # table and head; the norms of 2 layers


@pytest.mark.parametrize(
    "plan",
    [
        {"lm_head": "replicate", "model.embed_tokens": "replicate"},
        {"model.layers.*.mlp.up_proj": [Block(64)], "model.layers.1.mlp.gate_proj": "colwise"},
    ],
    ids=["a whole head and table", "blocks"],
)
def test_rules_of_the_callers(plan: dict[str, Any]) -> None:
    assert_equals_whole(lambda: llama(attn_implementation="eager", num_key_value_heads=1), (2,), plan=plan)


def nllb_moe() -> Any:
    return transformers.NllbMoeForConditionalGeneration(families.config_of("nllb-moe"))


@each_rank(tp=2)
def test_a_rule_of_the_callers_for_every_expert(ctx: tpcore.ParallelContext) -> None:
    rule, model = "model.encoder.layers.*.ffn.experts.expert_*", nllb_moe()
    inner = [name for name, module in model.named_modules() if ".expert_" in name and isinstance(module, nn.Linear)]
    tpcore.parallelize(model, plan={f"{rule}.fc1": "replicate", f"{rule}.fc2": "replicate"})
    whole = [name for name in inner if type(model.get_submodule(name)) is nn.Linear]
    assert whole == [name for name in inner if name.startswith("model.encoder.")] != inner


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(**TINY, num_local_experts=4, num_key_value_heads=2, head_dim=8)
    return transformers.GptOssForCausalLM(config)


def codegen() -> Any:
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 8, "rotary_dim": 4}
    return transformers.CodeGenForCausalLM(transformers.CodeGenConfig(**sizes))


def ctrl() -> Any:
    """Its MLP is an ``nn.Sequential``. By a name that no family has."""
    sizes = {"vocab_size": 99, "n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.CTRLConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0)
    config.model_type = "unheard"
    return transformers.CTRLLMHeadModel(config)


def trained() -> Any:
    model = llama()
    model(**text()).loss.backward()
    return model


OUT = "transformer.h.*.attn.out_proj"
ORDER = r"h.0.attn.qkv_proj \(CodeGenAttention\) holds q\|v\|k of four groups"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a rule that matches nothing": (
        llama,
        {"model.layers.*.mlp.up": "colwise"},
        "match no module and no parameter: 'model.layers.\\*.mlp.up'",
    ),
    "a number that no module has": (
        ctrl,
        {"transformer.h.*.ffn.1.weight": "colwise"},
        r"no parameter: 'transformer.h.\*.ffn.1.weight'. .* of a layer or of an expert_1$",
    ),
    "a number where layers differ": (ctrl, {}, r"'transformer.h.\*.ffn.0': 'colwise', 'transformer.h.\*.ffn.2': "),
    "an unknown style": (
        llama,
        {"model.layers.*.mlp.up_proj": "diagonal"},
        "mlp.up_proj .*'diagonal' is not supported",
    ),
    "no entries for heads": (
        llama,
        {"model.layers.*.input_layernorm": "parameter_heads"},
        "input_layernorm .LlamaRMSNorm. has no entry, and no module, for each head",
    ),
    "no plan": (
        ctrl,
        {},
        "no plan of its own and its family is not known: .*'transformer.h.\\*.multi_head_attention.Wq': ",
    ),
    "another order, of heads": (codegen, {"transformer.h.*.attn.qkv_proj": "qkv_colwise", OUT: "rowwise"}, ORDER),
    "experts without a style": (
        gpt_oss,
        {"model.layers.*.mlp.experts.gate_up_proj_bias": "replicate"},
        r"mlp.experts.gate_up_proj_bias \(GptOssExperts\) has no style, and no known meaning",
    ),
    "features of experts": (
        lambda: mixtral(intermediate_size=33),
        {},
        r"tp=2 does not fit MixtralForCausalLM: .*\*.mlp.experts.down_proj has 33 features of each expert; .*"
        "Degrees that fit: 1, 3$",
    ),
    "gradients of the whole": (trained, {}, "zero_grad"),
}


def test_the_plan_that_is_proposed_equals_the_whole() -> None:
    with pytest.raises(ValueError, match="family is not known") as refused:
        rules_of(ctrl(), {})
    proposed = re.search(r"plan=({.*}), which", str(refused.value))
    assert proposed is not None
    hf.assert_equals_whole(ctrl, plan=ast.literal_eval(proposed[1]))


def test_no_rule_is_found_where_a_weight_may_be_read_without_a_call() -> None:
    """In a module with a user's forward, for a layer with a forward of its own, and in torch's attention."""

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    model = ctrl()
    first, second = model.transformer.h[:2]
    first.multi_head_attention.__class__ = type("Users", (type(first.multi_head_attention),), {"forward": len})
    second.ffn[0].__class__ = Reads
    second.more = nn.MultiheadAttention(8, 2)
    assert not any("multi_head_attention" in name or "more" in name for name in found(model, {}))  # in no layer
    assert "transformer.h.*.ffn.0" not in found(model, {})
    assert "transformer.h.*.ffn.2" in found(model, {})


def test_a_written_number_is_itself_beside_the_number_of_a_layer() -> None:
    attention = {f"transformer.h.*.multi_head_attention.{name}": "colwise" for name in ("Wq", "Wk", "Wv")}
    attention["transformer.h.*.multi_head_attention.dense"] = "rowwise"
    mlp = {"transformer.h.*.ffn.0": "colwise", "transformer.h.*.ffn.2": "rowwise"}
    hf.assert_equals_whole(ctrl, plan=attention | mlp)

    class WithPlan(transformers.CTRLLMHeadModel):  # a class that brings its own
        _tp_plan = attention | mlp

    assert rules_of(WithPlan(ctrl().config), {}).items() >= (attention | mlp).items()

    def kinds(ctx: tpcore.ParallelContext) -> list[str]:
        model = tpcore.parallelize(ctrl(), plan=attention | mlp | {"transformer.h.1.ffn": "replicate"})
        return [type(layer.ffn[i]).__name__ for layer in model.transformer.h for i in (0, 2)]

    assert run_ranks(TWO, kinds)[0] == ["ColumnParallelLinear", "RowParallelLinear", "Linear", "Linear"]


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_sharded_is_refused_by_name(what: str) -> None:
    make, plan, words = REFUSED[what]
    hf.refused(words, make, **({"plan": plan} if plan else {}))


@pytest.mark.parametrize("tp", [2, 8])
def test_groups_of_heads_stay_together(tp: int) -> None:
    """Where forward reads their number of the module, and not four of them on every rank."""
    ids = text()["input_ids"]
    plan = {"transformer.h.*.attn.qkv_proj": "colwise", OUT: "rowwise"}
    if not hasattr(codegen().transformer.h[0].attn, "mp_num"):
        hf.refused(ORDER, codegen, {"tp": tp}, plan=plan)
    elif tp == 8:
        hf.refused("attn.qkv_proj has 4 groups of heads. Degrees that fit: 1, 2, 4$", codegen, {"tp": tp}, plan=plan)
    else:
        want = hf.double(codegen)(ids).logits
        for found in run_ranks(TWO, lambda ctx: tpcore.parallelize(hf.double(codegen), plan=plan)(ids).logits[:]):
            torch.testing.assert_close(found, want, rtol=ROUNDS, atol=ROUNDS)


def test_all_misfits_are_named_with_the_degrees_that_fit() -> None:
    hf.refused(
        "tp=8 does not fit LlamaForCausalLM: .*gate_proj has 62 features.*q_proj has 6 heads.*Degrees that fit: 1, 2$",
        lambda: llama(intermediate_size=62, hidden_size=48, num_attention_heads=6),
        {"tp": 8},
    )


@each_rank(tp=2)
def test_other_modules_and_a_sharded_model_are_refused(ctx: tpcore.ParallelContext) -> None:
    with pytest.raises(TypeError, match="a model of transformers, not a Linear"):
        tpcore.parallelize(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="this LlamaForCausalLM is sharded already"):
        tpcore.parallelize(tpcore.parallelize(llama()))


def test_what_stays_whole_is_said(caplog: pytest.LogCaptureFixture) -> None:
    plan = {"model.layers.*.mlp": "replicate", "model.layers.*.self_attn": "heads_argument"}
    caplog.set_level("INFO", "tpcore")
    run_ranks(TWO, lambda ctx: tpcore.parallelize(llama(), plan=plan))
    lines = [r.getMessage() for r in caplog.records if "of the parameters" in r.getMessage()]
    assert lines == ["LlamaForCausalLM: sharded 50% of the parameters; whole: model.layers.*.mlp.*"]


def test_an_optimizer_made_before_goes_on_working() -> None:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = hf.double(lambda: llama(tie_word_embeddings=True))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    batches = [[text()]] * 4
    expected = hf.plain_steps(*made(), batches)

    def rank(ctx: tpcore.ParallelContext) -> list[float]:
        model, optimizer = made()
        return hf.plain_steps(tpcore.parallelize(model), optimizer, batches, tpcore.clip_grad_norm)

    for losses in run_ranks(TWO, rank):
        assert losses == pytest.approx(expected, rel=ROUNDS)
