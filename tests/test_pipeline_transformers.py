"""Models of transformers as they are: their own forward runs the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

transformers = pytest.importorskip("transformers")
LOSS = {"rtol": 1e-6, "atol": 1e-7}  # transformers takes a causal model's loss in float32
SIZES = {"vocab_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 16}


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=1, use_cache=False, **options)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=32, n_layer=4, n_head=2, n_embd=16, n_positions=8, use_cache=False, **off
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, intermediate_size=24, **off))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "bert": bert}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batch() -> dict[str, Tensor]:
    """With padding: masks differ by microbatch, and the numbers of labels do not."""
    ids = torch.randint(0, 32, (6, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(6, 8, dtype=torch.int64)
    mask[1, :3], mask[4, 5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@pytest.mark.parametrize("engine", ["layers", "lockstep"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(name: str, engine: str) -> None:
    dense = made(name)
    want = dense(**batch()).loss
    want.backward()
    grads = {n: p.grad for n, p in dense.named_parameters()}

    def rank(ctx: ParallelContext) -> set[str]:
        model = made(name)
        pipe = tpcore.PipelineModel(model, 3)
        if engine == "lockstep":
            loss = pipe.run_train(**batch())
        else:
            out = model(**batch())
            loss = out.loss
            loss.backward()
            assert out.logits.shape == (6, 8, 32)
        torch.testing.assert_close(loss.detach(), want.detach(), **LOSS)
        torch.testing.assert_close(pipe.run_eval(**batch()), want.detach(), **LOSS)
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.grad, grads[n], **LOSS)
        return {n for n, _ in model.named_parameters()}

    names = run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), rank)
    assert set().union(*names) == set(grads)


def test_the_loss_of_all_tokens_where_microbatches_have_different_numbers() -> None:
    """The model divides by the number that it is given; the microbatches' losses are added."""
    labels = batch()["input_ids"].clone()
    labels[0, :] = labels[3, 2:] = -100
    dense = made("llama")
    count = (labels[:, 1:] != -100).sum()
    want = dense(input_ids=batch()["input_ids"], labels=labels).loss
    pipe_batch = {"input_ids": batch()["input_ids"], "labels": labels, "num_items_in_batch": count}

    def rank(ctx: ParallelContext) -> None:
        pipe = tpcore.PipelineModel(made("llama"), 3, loss="sum")
        torch.testing.assert_close(pipe.run_train(**pipe_batch), want.detach(), **LOSS)

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), rank)


def test_a_cache_is_refused_with_the_remedy() -> None:
    def rank(ctx: ParallelContext) -> None:
        model = made("llama")
        tpcore.PipelineModel(model, 2)
        with pytest.raises(ValueError, match=r"past_key_values, a DynamicCache: .*use_cache=False"):
            model(**batch(), use_cache=True)

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), rank)


def test_layers_of_two_kinds_are_refused() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = transformers.Qwen2Config(
        **SIZES, intermediate_size=24, num_key_value_heads=1, layer_types=types, sliding_window=4
    )
    model = transformers.Qwen2ForCausalLM(config)
    with pytest.raises(ValueError, match=r"two kinds: .*'sliding_attention' and 'full_attention'"):
        run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), lambda ctx: tpcore.PipelineModel(model, 2))


def test_an_encoder_and_its_decoder_are_refused() -> None:
    config = transformers.BartConfig(
        vocab_size=32, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    with pytest.raises(ValueError, match=r"several lists of layers, model\.encoder\.layers, model\.decoder"):
        run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), lambda ctx: tpcore.PipelineModel(model, 2))
