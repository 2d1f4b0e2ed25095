"""Heads that tp does not divide: training, generation and files are those of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import hf
from helpers.tiers import tiers

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

FIVE = {"hidden_size": 40, "num_attention_heads": 5}
SIZES = {**hf.TINY, **FIVE, "head_dim": 8, "num_key_value_heads": 5}


def llama(queries: int = 5, keys: int = 5, **options: Any) -> Any:
    return hf.llama(**{**FIVE, "num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": 8, **options})


MODELS: dict[str, Any] = {
    "5 heads": llama,
    "10 heads, 5 keys": lambda: llama(10, 5),
    "6 heads, 3 keys": lambda: llama(6, 3, hidden_size=48),
    "5 heads, 1 key": lambda: llama(5, 1),
    "with biases": lambda: llama(attention_bias=True),
    "norms of heads": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "q, k and v in one": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**{**hf.GPT2, "n_embd": 40, "n_head": 5})
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**{**hf.TINY, **FIVE, "word_embed_proj_dim": 40, "ffn_dim": 64, "dropout": 0.0})
    ),
}
QUICK = ["5 heads", "10 heads, 5 keys", "5 heads, 1 key", "q, k and v in one"]


@pytest.mark.parametrize("name", tiers(QUICK, slow=MODELS))
def test_loss_output_and_gradients(name: str) -> None:
    # transformers' norms round to float32
    hf.assert_equals_whole(MODELS[name], (2, 4), tolerance=1e-6)


@pytest.mark.parametrize("options", [{"sequence_parallel": True}, {"num_microbatches": 3}])
def test_with_tokens_in_parts_and_stages(options: dict[str, Any]) -> None:
    axes = {"pp": 2, "dp": 1, "tp": 2} if "num_microbatches" in options else {"dp": 1, "tp": 2}
    ids = hf.text()["input_ids"]
    hf.assert_equals_whole(llama, (axes,), {"input_ids": ids, "labels": ids}, tolerance=1e-6, **options)


@pytest.mark.parametrize("name", tiers(["10 heads, 5 keys"], slow=["5 heads, 1 key", "q, k and v in one"]))
def test_generation_files_and_weights_of_all_heads(name: str, tmp_path: Path) -> None:
    whole = hf.double(MODELS[name]).eval()
    ids = hf.text()["input_ids"][:2, :4]
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "pad_token_id": 0}
    want = whole.generate(ids, do_sample=False, **asked)
    whole.set_attn_implementation("eager")
    seen = whole(ids, output_attentions=True).attentions
    whole.save_pretrained(tmp_path / "whole")

    def rank(ctx: tpcore.ParallelContext) -> None:
        with tpcore.lazy():
            model: Any = type(whole).from_pretrained(tmp_path / "whole", dtype=torch.float64)
        tpcore.parallelize(model).eval()
        assert torch.equal(model.generate(ids, do_sample=False, **asked), want)
        assert model.num_parameters() == whole.num_parameters()
        model.save_pretrained(tmp_path / "sharded")
        model.set_attn_implementation("eager")
        for got, expected in zip(model(ids, output_attentions=True).attentions, seen, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)

    run_ranks(Mesh({"tp": 2}), rank)
    again = type(whole).from_pretrained(tmp_path / "sharded", dtype=torch.float64)
    for (key, p), q in zip(again.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q), key


def test_steps_and_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    """Padding stays zero: at tp 4, then at tp 2 and dp 2."""
    made = torch.Generator().manual_seed(2)
    whole = hf.double(MODELS["10 heads, 5 keys"])
    ids = [torch.randint(3, 99, (4, 8), generator=made) for _ in range(8)]
    batches = [[{"input_ids": each, "labels": each}] for each in ids]
    want = hf.plain_steps(whole, torch.optim.AdamW(whole.named_parameters(), lr=1e-2), batches)

    def rank(ctx: tpcore.ParallelContext) -> list[float]:
        model = tpcore.parallelize(hf.double(MODELS["10 heads, 5 keys"]))
        optimizer, dp = torch.optim.AdamW(model.named_parameters(), lr=1e-2), ctx.batch.size
        if dp > 1:
            tpcore.checkpoint.load(tmp_path / "c", model, optimizer=optimizer)
        half = [[{"input_ids": p, "labels": p} for p in each.chunk(dp)] for each in (ids[4:] if dp > 1 else ids[:4])]
        seen = hf.parallel_steps(ctx, model, optimizer, half)
        tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "c")
        return seen

    got = run_ranks(Mesh({"dp": 1, "tp": 4}), rank)[0]
    got += run_ranks(Mesh({"dp": 2, "tp": 2}), rank)[0]
    assert got == pytest.approx(want, rel=1e-5)  # norms round to float32, and AdamW divides by roots of small squares


@pytest.mark.parametrize(
    ("make", "said"),
    [
        # the output projection is in another module than the heads
        (
            lambda: transformers.BertForMaskedLM(transformers.BertConfig(**{**hf.TINY, **FIVE})),
            "tp=2 does not fit .* has 5 heads",
        ),
        # a bias for each head
        (
            lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**{**hf.T5, "num_heads": 5})),
            "5 heads",
        ),
        # features of the MLP; heads would be padded at degrees that fit it
        (lambda: llama(6, 2, hidden_size=48, intermediate_size=63), "has 63 features; .*Degrees that fit: 1, 3$"),
    ],
)
def test_what_cannot_be_padded_is_refused(make: Any, said: str) -> None:
    hf.refused(said, make, {"tp": 2})
