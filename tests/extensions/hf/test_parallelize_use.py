"""A cut model in use: it generates what the whole one does; what would be wrong in silence is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import families
from helpers.hf import T5, TINY, assert_equals_whole, llama, mixtral, step, text
from helpers.rank_pool import RankPool
from helpers.worlds import each_rank

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks
from tpcore_hf.shard.refusals import is_guarded

TWO = Mesh({"tp": 2})
ROUNDS = 1e-6  # norms and routers of transformers compute in float32


def generated(model: Any, **options: Any) -> torch.Tensor:
    batch = text()
    ids, mask = (batch["input_ids"], batch["attention_mask"].flip(1))  # padding on the left, as generation wants it
    transformers.set_seed(7)
    return model.eval().generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "cache_implementation": "static", "prefill_chunk_size": 3, "disable_compile": True},
        {"do_sample": False, "use_cache": False},
        {"num_beams": 2, "do_sample": False},
    ],
    ids=["greedy", "static cache", "static cache in chunks", "no cache", "beams"],
)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "tokens"])
def test_generates_what_the_whole_model_does(options: dict[str, Any], sequence_parallel: bool) -> None:
    assert_equals_whole(
        lambda: llama(num_key_value_heads=1),
        (2,),
        run=lambda model, batch: (generated(model, **options),),
        sequence_parallel=sequence_parallel,
    )


def _sampled(ctx: tpcore.ParallelContext) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    torch.manual_seed(0)
    whole = llama(num_key_value_heads=1)
    expected = generated(whole, **options)
    model = tpcore.parallelize(whole)
    assert torch.equal(generated(model, **options), expected)


def test_samples_what_the_whole_model_does(pool: RankPool) -> None:
    """In processes, because ranks that are threads share torch's random numbers."""
    pool.run(TWO, _sampled)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=["tokens", "beams", "assisted"]
)
def test_ranks_with_different_seeds_return_one_text(options: dict[str, Any]) -> None:
    ids = text()["input_ids"][: 1 if "prompt_lookup_num_tokens" in options else 3]

    def rank(ctx: tpcore.ParallelContext) -> list[list[int]]:
        torch.manual_seed(0)
        model = tpcore.parallelize(llama()).eval()
        torch.manual_seed(ctx.rank)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=8, pad_token_id=0, **options
        )
        return found.tolist()

    first, second = run_ranks(TWO, rank)
    assert first == second


@each_rank(tp=2)
def test_ranks_write_one_text_of_one_prompt(ctx: tpcore.ParallelContext) -> None:
    model = tpcore.parallelize(llama()).eval()
    with pytest.raises(ValueError, match=r"max_time=2.5 over 2 ranks: each has a clock of its own.*max_new_tokens"):
        model.generate(text()["input_ids"], max_new_tokens=3, max_time=2.5)
    with pytest.raises(
        ValueError, match=r"ranks 0 and 1 of one text differ in inputs: each rank of tp and pp passes the"
    ):
        model.generate(text()["input_ids"] + ctx.rank, max_new_tokens=3)


@pytest.mark.parametrize(("make", "options"), [(llama, {}), (mixtral, {"output_router_logits": True})])
def test_logits_in_a_tuple_are_whole(make: Any, options: dict[str, bool]) -> None:
    def run(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
        output = model.eval()(**batch, return_dict=False, **options)
        return [t for t in output if isinstance(t, torch.Tensor)]

    assert_equals_whole(make, (2,), run=run, tolerance=ROUNDS)


def _powers(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    return (logits.softmax(-1).square().sum(-1) * (labels != -100)).mean()


def _with_another_head(model: Any) -> None:
    torch.manual_seed(3)
    model.lm_head = torch.nn.Linear(32, 99, bias=False).double()


def _with_another_loss(model: Any) -> None:
    model.loss_function = _powers


@pytest.mark.parametrize("change", [_with_another_head, _with_another_loss])
def test_a_head_or_a_loss_that_is_set_afterwards_has_all_of_the_vocabulary(change: Any) -> None:
    def run(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        change(model)
        return step(model, batch)

    assert_equals_whole(llama, (2,), run=run)


@pytest.mark.parametrize(("family", "degree"), [("bert", 2), ("t5", 2), ("llama", 4), ("gpt_bigcode", 4)])
def test_attention_weights_are_those_of_all_heads(family: str, degree: int) -> None:
    """Cross-attention too, and several ranks with one key head."""
    config, kind = families.config_of(family), families.class_of(family)
    config._attn_implementation = "eager"
    assert kind is not None

    def run(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
        output = model.eval()(**{"use_cache": False, **batch}, output_attentions=True)
        if family == "bert" and is_guarded(model):
            with pytest.raises(ValueError, match="BertLMHeadModel needs return_dict=True"):
                model(**batch, output_attentions=True, return_dict=False)
        return [t for name, every in output.items() if "attentions" in name and every for t in every]

    batch = families.batch_of(families.made(kind, config))
    assert_equals_whole(lambda: families.made(kind, config), (degree,), batch, run)


def test_distributed_data_parallel_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:

        def rank(ctx: tpcore.ParallelContext) -> None:
            model = tpcore.parallelize(llama())
            with pytest.raises(ValueError, match="copy the first rank's part of this LlamaForCausalLM"):
                torch.nn.parallel.DistributedDataParallel(model)

        run_ranks(TWO, rank)
    finally:
        dist.destroy_process_group()


def test_what_would_pass_by_a_sharded_model_is_refused() -> None:
    class PeftModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = torch.nn.ModuleDict({"model": llama()})

    class Int8Tensor(torch.nn.Parameter):
        pass

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = llama()
        model._is_accelerate_prepared = True  # as accelerate marks what it has prepared
        with pytest.raises(ValueError, match="is sharded over ranks, and accelerate"):
            bool(tpcore.parallelize(model)._is_accelerate_prepared)
        model = tpcore.parallelize(llama())
        with pytest.raises(ValueError, match="resize_token_embeddings before"):
            model.resize_token_embeddings(120)
        # as TRL's trainers replace the forward, with an argument of this name
        model.forward = lambda fused_lm_head, **inputs: model.get_output_embeddings().weight
        with pytest.raises(ValueError, match=r"train this model with SFTTrainer or DPOTrainer of tpcore_hf\.trl"):
            model(**text(), fused_lm_head=True)
        with pytest.raises(TypeError, match=r"not a PeftModel: pass model\.base_model\.model$"):
            tpcore.parallelize(PeftModel())
        model = llama()
        proj = model.model.layers[0].self_attn.q_proj
        proj.weight = Int8Tensor(proj.weight.detach())
        with pytest.raises(ValueError, match=r"self_attn\.q_proj has a weight of .*Int8Tensor, and quantized"):
            tpcore.parallelize(model)
        config = transformers.OPTConfig(**{**TINY, "ffn_dim": 64, "word_embed_proj_dim": 32})
        with pytest.raises(ValueError, match="OPTDecoderLayer calls fc1 itself"):  # it may mix tokens
            tpcore.parallelize(transformers.OPTForCausalLM(config), sequence_parallel=True)

    run_ranks(TWO, rank)


class Adapted(torch.nn.Module):
    """What stands in the place of a layer with an adapter."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


@each_rank(tp=2)
def test_adapters_on_modules_that_are_cut_afterwards_are_refused(ctx: tpcore.ParallelContext) -> None:
    model: Any = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    with pytest.raises(ValueError, match=r"is a test_.*\.Adapted, and .* plan={'model\.layers\.\*\.self_attn'"):
        tpcore.parallelize(model)
    tpcore.parallelize(model, plan={"model.layers.*.self_attn": "replicate"})


def quantize_(model: Any) -> None:
    """As torchao's with its default filter: each ``nn.Linear`` gets a weight of a class of its own."""

    class Packed(torch.Tensor):
        pass

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.detach().as_subclass(Packed), requires_grad=False)


def quantize_dynamic(model: Any) -> None:
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)


def inject(model: Any) -> None:
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj", "down_proj"]), model.model.layers)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (quantize_, "weight cannot become a Packed, of this rank's part: quantize before"),
        (quantize_dynamic, "quantizes modules that it knows, and no Parallel"),
        (inject, "Target module ColumnParallelLinear.* is not supported"),  # peft's own words
    ],
)
def test_who_knows_torchs_layers_alone_is_refused(how: Any, words: str) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(llama())
        before = {name: id(p) for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=words):
            how(model)
        assert {name: id(p) for name, p in model.named_parameters()} == before

    run_ranks(TWO, rank)


def test_torchs_own_clipping_is_refused_before_and_after_files_are_read(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        for model in (llama(), read):
            tpcore.parallelize(model).train()(**text()).loss.backward()
            with pytest.raises(ValueError, match=r"call tpcore\.clip_grad_norm"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    run_ranks(TWO, rank)


def t5() -> Any:
    config = transformers.T5Config(**T5, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


LOSSES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], float]] = {
    # sums in parts round elsewhere: bfloat16 has 8 bits, and a loss of about 4.6 moves by 1%
    "bfloat16": (llama, {"sequence_parallel": True}, {}, 1e-2),
    # what the Trainer passes: a number of tokens of several batches; float32
    "a count of the caller's": (llama, {}, {"num_items_in_batch": torch.tensor(40)}, 1e-5),
    "an encoder and a decoder": (t5, {"sequence_parallel": True}, {}, 1e-5),
}


@pytest.mark.parametrize("how", LOSSES)
def test_the_loss_is_that_of_the_whole_model(how: str) -> None:
    make, options, given, tolerance = LOSSES[how]

    def loss(cut: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = make()
        if cut:
            tpcore.parallelize(model, **options)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "bfloat16"):
            out = model.train()(**text(), **given).loss
        out.backward()
        return out.detach()

    expected = loss(cut=False)
    run_ranks(TWO, lambda ctx: torch.testing.assert_close(loss(cut=True), expected, rtol=tolerance, atol=0))
