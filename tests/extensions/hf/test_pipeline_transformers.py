"""Models of transformers as they are: their own forward runs the pipeline."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from helpers import hf
from helpers.hf import GPT2, NO_DROPOUT, TINY
from helpers.worlds import each_rank
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

LOSS = {"rtol": 1e-6, "atol": 1e-7}  # transformers takes a causal model's loss in float32


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.llama(num_hidden_layers=4, use_cache=False),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "n_layer": 4}, use_cache=False)),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**{**TINY, "num_hidden_layers": 4}, **NO_DROPOUT)
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batch() -> dict[str, Tensor]:
    """With padding: masks differ by microbatch, and the numbers of labels do not."""
    ids = torch.randint(3, 99, (6, 8), generator=torch.Generator().manual_seed(1))
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
            assert out.logits.shape == (6, 8, 99)
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


@each_rank(pp=2, dp=1, tp=1)
def test_a_cache_is_refused_with_the_remedy(ctx: ParallelContext) -> None:
    model = made("llama")
    tpcore.PipelineModel(model, 2)
    with pytest.raises(ValueError, match=r"get (cache|past_key_values), a DynamicCache: .*use_cache=False"):
        model(**batch(), use_cache=True)
