"""Models of transformers whose tokens are dealt to ranks: loss and every gradient are those of the whole model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf import GPT2, NO_DROPOUT, TINY, llama
from torch import Tensor, nn

import tpcore
from tpcore import Mesh
from tpcore.layers.sharding import sharding
from tpcore.testing import run_ranks

EXACT = 1e-12  # float64, in which the order of sums is all that differs
CP2, CP4, CP2_TP2 = ({"dp": 1, "cp": 2, "tp": 1}, {"dp": 1, "cp": 4, "tp": 1}, {"dp": 1, "cp": 2, "tp": 2})
QWEN3 = {**TINY, "num_key_value_heads": 2, "head_dim": 8}


class _Wide:
    """torch, in which transformers' modules find float64 where they ask for float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes norms, rotary positions and losses in float32, whatever a model's dtype is."""
    narrow = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda t: t if t.dtype == torch.float64 else narrow(t))
    for make in MODELS.values():
        make()  # imports its module
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and "experts" not in name and getattr(module, "torch", None) is torch:
            monkeypatch.setattr(module, "torch", _Wide())


def mistral() -> Any:
    config = transformers.MistralConfig(**QWEN3, sliding_window=5, attn_implementation="sdpa")
    return transformers.MistralForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3)),
    "mistral, window": mistral,
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**{**TINY, **NO_DROPOUT})),
}


def plain() -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = -100  # another number of targets on each rank
    return {"input_ids": ids, "labels": labels}


def packed() -> dict[str, Any]:
    """Documents of 5, 8 and 3 tokens, and of 9 and 7; with a cache transformers would take them for one."""
    lengths = ((5, 8, 3), (9, 7))
    return {
        **plain(),
        "position_ids": torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]),
        "use_cache": False,
    }


def padded() -> dict[str, Tensor]:
    """Padding on the left of one row and on the right of the other."""
    batch = plain()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :6], mask[1, -3:] = 0, 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


WAYS = ("gather", "ulysses", "ring")
BATCHES = {"plain": plain, "packed": packed, "padded": padded}


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().double()


def assert_equal(
    make: Callable[[], nn.Module], mesh: dict[str, int], batch: dict[str, Any], way: str | None, **options: Any
) -> None:
    whole = made(make)
    want = whole(**batch).loss
    want.backward()
    whole.eval()
    logits = whole(**batch).logits
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(make), context_parallel=way, **options)
        loss = model(**batch).loss
        loss.backward()
        torch.testing.assert_close(loss, want, rtol=EXACT, atol=EXACT)
        tpcore.reduce_gradients(model)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            found, expected = sharding(p), q.grad
            if found is not None:
                expected = found.layout.shard(expected, ctx.rank, ctx.mesh)
            torch.testing.assert_close(
                p.grad, expected, rtol=EXACT, atol=EXACT, msg=lambda m, name=name: f"{name}: {m}"
            )
        model.eval()
        with torch.no_grad():
            out = model(**batch)
        torch.testing.assert_close(out.loss, want, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(out.logits[seen], logits[seen], rtol=EXACT, atol=EXACT)

    run_ranks(Mesh(mesh), rank)


@pytest.mark.parametrize("mesh", [CP2, CP2_TP2], ids=["cp2", "cp2 tp2"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_whole_model(name: str, way: str, mesh: dict[str, int]) -> None:
    assert_equal(MODELS[name], mesh, plain(), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["llama", "mistral, window", "bert"])
def test_of_documents_and_padding(name: str, batch: str, way: str) -> None:
    if name == "bert" and batch == "packed":
        pytest.skip("a model that is not causal has no packed documents")
    assert_equal(MODELS[name], CP4, BATCHES[batch](), way)


def test_gradients_of_logits_that_a_loop_scores_itself() -> None:
    batch = {"input_ids": plain()["input_ids"]}

    def loss_of(model: Any) -> Tensor:
        return F.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    whole = made(llama)
    loss_of(whole).backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(llama))
        loss_of(model).backward()
        tpcore.reduce_gradients(model)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=EXACT, atol=EXACT)

    run_ranks(Mesh(CP2), rank)
