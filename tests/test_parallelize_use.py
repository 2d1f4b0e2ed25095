"""A cut model in use: it generates what the whole one does; what would be wrong in silence is an error."""

from __future__ import annotations

import copy
from pathlib import Path
from types import FunctionType
from typing import Any

import families
import pytest
import torch
import torch.distributed as dist
import transformers
from hf import TINY, llama, text
from rank_pool import RankPool

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

TWO = Mesh({"tp": 2})


def generated(model: Any, **options: Any) -> torch.Tensor:
    batch = text()
    ids, mask = (
        batch["input_ids"],
        batch["attention_mask"].flip(1),
    )  # padding on the left, as generation wants it
    transformers.set_seed(7)
    return model.eval().generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "use_cache": False},
        {"num_beams": 2, "do_sample": False},
    ],
    ids=["greedy", "static cache", "no cache", "beams"],
)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "tokens"])
def test_generates_what_the_whole_model_does(options: dict[str, Any], sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    whole = llama(num_key_value_heads=1)
    expected = generated(whole, **options)

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(0)
        model = tpcore.parallelize(llama(num_key_value_heads=1), sequence_parallel=sequence_parallel)
        assert torch.equal(generated(model, **options), expected)

    run_ranks(TWO, rank)


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
    rows = 1 if "prompt_lookup_num_tokens" in options else 3

    def rank(ctx: tpcore.ParallelContext) -> list[list[int]]:
        torch.manual_seed(0)
        model = tpcore.parallelize(llama()).eval()
        torch.manual_seed(ctx.rank)
        ids = text()["input_ids"][:rows]
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=8,
            pad_token_id=0,
            **options,
        )
        return found.tolist()

    first, second = run_ranks(TWO, rank)
    assert first == second


def test_hidden_states_are_whole_where_asked_for() -> None:
    torch.manual_seed(0)
    whole = llama()
    expected = whole(**text(), output_hidden_states=True).hidden_states

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(0)
        model = tpcore.parallelize(llama(), sequence_parallel=True)
        got = model(**text(), output_hidden_states=True).hidden_states
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # float32

    run_ranks(TWO, rank)


def attentions(model: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    batch = {"use_cache": False, "output_attentions": True} | families.batch_of(model)
    output = model.eval()(**batch)
    return {name: t for name, t in output.items() if "attentions" in name and t}


@pytest.mark.parametrize(("family", "degree"), [("bert", 2), ("t5", 2), ("llama", 4), ("gpt_bigcode", 4)])
def test_attention_weights_are_those_of_all_heads(family: str, degree: int) -> None:
    """Cross-attention too, and several ranks with one key head."""
    config, kind = families.config_of(family), families.class_of(family)
    config._attn_implementation = "eager"
    expected = attentions(families.made(kind, config))

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(families.made(kind, config))
        got = attentions(model)
        assert got.keys() == expected.keys()
        for name, every in expected.items():
            for one, other in zip(got[name], every, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # float64
        if family == "bert":
            with pytest.raises(ValueError, match="BertLMHeadModel needs return_dict=True"):
                model(**families.batch_of(model), output_attentions=True, return_dict=False)

    run_ranks(Mesh({"tp": degree}), rank)


def test_the_vocabulary_cannot_be_resized() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        with pytest.raises(ValueError, match="resize_token_embeddings before"):
            tpcore.parallelize(llama()).resize_token_embeddings(120)

    run_ranks(TWO, rank)


def test_distributed_data_parallel_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:

        def rank(ctx: tpcore.ParallelContext) -> None:
            model = tpcore.parallelize(llama())
            with pytest.raises(ValueError, match="copy rank 0's part of this LlamaForCausalLM"):
                torch.nn.parallel.DistributedDataParallel(model)

        run_ranks(TWO, rank)
    finally:
        dist.destroy_process_group()


def test_a_model_that_accelerate_had_before_is_refused_to_it() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = llama()
        model._is_accelerate_prepared = True  # as accelerate marks what it has prepared
        with pytest.raises(ValueError, match="is cut over ranks, and accelerate"):
            bool(tpcore.parallelize(model)._is_accelerate_prepared)

    run_ranks(TWO, rank)


def test_adapters_on_cut_parameters_are_refused() -> None:
    """As peft adds them: a tuner finds that there are some already, and puts its own beside them."""

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(llama())
        with pytest.raises(ValueError, match=r"by tpcore\.integrations\.peft\.get_peft_model"):
            model.peft_config.update({"default": None})
        with pytest.raises(ValueError, match="one rank's part of its parameters"):
            model.peft_config["default"] = None
        # modules that an adapter replaces by their class are not of one that it knows
        known = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, transformers.pytorch_utils.Conv1D)
        assert not any(isinstance(m, known) for m in model.modules())
        assert isinstance(copy.deepcopy(model), transformers.LlamaForCausalLM)

    run_ranks(TWO, rank)


def test_adapters_on_modules_that_are_cut_afterwards_are_refused() -> None:
    class Adapted(torch.nn.Module):  # what stands in the place of a layer with an adapter
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x)

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = llama()
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        with pytest.raises(ValueError, match=r"is a test_.*\.Adapted, and .* plan={'model\.layers\.\*\.self_attn'"):
            tpcore.parallelize(model)
        tpcore.parallelize(model, plan={"model.layers.*.self_attn": "replicate"})

    run_ranks(TWO, rank)


def test_a_model_around_one_of_transformers_is_refused_by_where_that_is() -> None:
    class PeftModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = torch.nn.ModuleDict({"model": llama()})

    def rank(ctx: tpcore.ParallelContext) -> None:
        with pytest.raises(TypeError, match=r"not a PeftModel: pass model\.base_model\.model$"):
            tpcore.parallelize(PeftModel())

    run_ranks(TWO, rank)


def quantize_(model: Any) -> None:
    """As torchao's walks over a model, with a filter for instances of ``nn.Linear``."""
    assert not isinstance(model, torch.nn.Linear), "no linear layer is left"
    for _, child in list(model.named_children()):
        globals()["quantize_"](child)


def by_names(model: Any) -> None:
    dict(model.named_modules())


@pytest.mark.parametrize("how", [quantize_, by_names])
def test_quantizers_that_would_pass_by_sharded_layers_are_refused(how: Any) -> None:
    """Found by the name of the module whose function it is, so these are made functions of torchao's."""
    torchao: dict[str, Any] = {**globals(), "__name__": "torchao.quantization.quant_api"}
    torchao["quantize_"] = quantize = FunctionType(how.__code__, torchao)

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(llama())
        assert dict(model.named_modules())
        with pytest.raises(ValueError, match="quant_api quantizes modules that it knows, and no Parallel"):
            quantize(model)

    run_ranks(TWO, rank)


def test_a_loss_that_reads_the_head_itself_is_refused() -> None:
    """As TRL's trainers replace the forward, with an argument of this name."""

    def rank(_: tpcore.ParallelContext) -> None:
        model: Any = tpcore.parallelize(llama())
        model.forward = lambda fused_lm_head, **inputs: model.get_output_embeddings().weight
        with pytest.raises(ValueError, match=r"train this model with SFTTrainer or DPOTrainer of tpcore\.integrations"):
            model(**text(), fused_lm_head=True)

    run_ranks(Mesh({"tp": 2}), rank)


def test_quantized_weights_are_refused_by_name() -> None:
    class Int8Tensor(torch.nn.Parameter):
        pass

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = llama()
        proj = model.model.layers[0].self_attn.q_proj
        proj.weight = Int8Tensor(proj.weight.detach())
        with pytest.raises(ValueError, match=r"self_attn\.q_proj has a weight of .*Int8Tensor, and quantized"):
            tpcore.parallelize(model)

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


def test_bfloat16_under_autocast_stays_close() -> None:
    """Sums in parts round elsewhere: bfloat16 has 8 bits, and a loss of about 4.6 moves by 1%."""
    torch.manual_seed(0)
    whole = llama()
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(**text()).loss.detach()

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(0)
        model = tpcore.parallelize(llama(), sequence_parallel=True).train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**text()).loss
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-2, atol=0)

    run_ranks(TWO, rank)


def test_labels_of_the_last_tokens_only_and_a_count_of_the_callers() -> None:
    """What the Trainer passes: a number of tokens of several batches."""
    torch.manual_seed(0)
    whole = llama()
    expected = whole(**text(), num_items_in_batch=torch.tensor(40)).loss

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(0)
        model = tpcore.parallelize(llama())
        loss = model(**text(), num_items_in_batch=torch.tensor(40)).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)  # float32

    run_ranks(TWO, rank)


def test_an_encoder_decoder_with_tokens_spread() -> None:
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    torch.manual_seed(0)
    whole = transformers.T5ForConditionalGeneration(config)
    expected = whole(**text()).loss

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(0)
        model = tpcore.parallelize(transformers.T5ForConditionalGeneration(config), sequence_parallel=True)
        torch.testing.assert_close(model(**text()).loss, expected, rtol=1e-5, atol=1e-5)  # float32

    run_ranks(TWO, rank)


def test_layers_that_may_mix_tokens_are_refused_with_tokens_spread() -> None:
    config = transformers.OPTConfig(**{**TINY, "ffn_dim": 64, "word_embed_proj_dim": 32})

    def rank(ctx: tpcore.ParallelContext) -> None:
        with pytest.raises(ValueError, match="OPTDecoderLayer calls fc1 itself"):
            tpcore.parallelize(transformers.OPTForCausalLM(config), sequence_parallel=True)

    run_ranks(TWO, rank)
