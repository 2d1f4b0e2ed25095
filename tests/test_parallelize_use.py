"""A cut model in use: it generates what the whole one does; what would be wrong in silence is an error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf import TINY, llama, text

import tpcore
from tpcore import Mesh
from tpcore.processes.pool import RankPool
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


def test_adapters_on_cut_parameters_are_refused() -> None:
    """As peft adds them: a tuner finds that there are some already, and puts its own beside them."""

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(llama())
        with pytest.raises(ValueError, match=r"before tpcore\.parallelize, with a plan that leaves"):
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
        with pytest.raises(ValueError, match=r"q_proj \(Adapted\): style 'colwise' is not supported"):
            tpcore.parallelize(model)
        tpcore.parallelize(model, plan={"model.layers.*.self_attn": "replicate"})

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
