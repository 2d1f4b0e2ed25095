"""A part of the table in docs/correctness.md anew: models of transformers have the same bits on every mesh."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.tiers import tiers
from torch import Tensor
from transformers import AttentionInterface, DeepseekV3Config, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel

import tpcore_hf
from benchmarks.reproducible import MESHES, MODELS, Trained, on
from tpcore.layout.mesh import Mesh
from tpcore.layout.shard import Block
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_hf.shard.forwards import dim_of_heads

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUICK = [
    ("Llama, 4 key/value heads for 8", "float32", 2),
    ("Llama, tied", "bfloat16", 3),
    ("Qwen3, sequence parallel", "float32", 2),
    ("Llama, heads of 4 features, eager attention", "float32", 2),
    ("OLMo 2, sequence parallel", "float32", 1),
    ("Mixtral", "float32", 2),
    ("Llama, LoRA, sequence parallel", "float32", 5),
]
REST = [
    (name, dtype, 1 + (i + step) % (len(MESHES) - 1))
    for i, name in enumerate(MODELS)
    for dtype, steps in (("float32", (0, 1)), ("bfloat16", (2, 3)))
    for step in steps
]


@pytest.mark.parametrize(("name", "dtype", "mesh"), tiers(QUICK, REST))
def test_steps_of_a_model_have_the_same_bits(name: str, dtype: str, mesh: int) -> None:
    want = on({"tp": 1}, MODELS[name], DTYPES[dtype], 2)
    assert on(MESHES[mesh], MODELS[name], DTYPES[dtype], 2, zero=mesh > 2) == want


NO_LINES = {"num_key_value_heads": 8, "head_dim": 6}
ONE_HEAD = {
    "eager": Trained("bert", MODELS["BERT, eager attention"].config),
    "rows of no whole cache lines": Trained("llama", MODELS["Qwen2"].config | NO_LINES),
}


@pytest.mark.parametrize("case", ONE_HEAD)
def test_one_head_on_a_rank_has_the_bits_that_it_has_beside_others(case: str) -> None:
    """Its queries and keys have another layout in memory."""
    assert on({"tp": 8}, ONE_HEAD[case], torch.float32, 1) == on({"tp": 1}, ONE_HEAD[case], torch.float32, 1)


def by_einsum(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    weights = torch.einsum("bhqd,bhkd->bhqk", [query, key]).softmax(-1)
    return torch.einsum("b h q k, b h k d -> b q h d", weights, value), None


AS_WRITTEN = {
    "einsum": Trained("phi", MODELS["Phi"].config | {"attn_implementation": "by_einsum"}),
    "norm after heads are transposed": Trained("gemma3_text", MODELS["Qwen2"].config | {"head_dim": 16}),
}


@pytest.mark.parametrize("case", AS_WRITTEN)
def test_however_heads_are_written(case: str) -> None:
    AttentionInterface.register("by_einsum", by_einsum)
    assert on({"tp": 2}, AS_WRITTEN[case], torch.float32, 1) == on({"tp": 1}, AS_WRITTEN[case], torch.float32, 1)


def test_heads_are_found_beside_as_many_tokens() -> None:
    q_and_k, x = [Block(32, 8), Block(16, 8)], torch.zeros(2, 4, 4, 8)
    assert dim_of_heads(q_and_k, x) == 2
    assert dim_of_heads(q_and_k, x.transpose(1, 2)) == 1
    assert dim_of_heads(q_and_k, torch.zeros(1, 2, 9, 8)) == 1
    with pytest.raises(ValueError, match=r"shape \(2, 3, 5, 8\) has no dim of the 2, 4 heads"):
        dim_of_heads(q_and_k, torch.zeros(2, 3, 5, 8))


def test_without_it_they_have_not() -> None:
    llama = MODELS["Llama, 4 key/value heads for 8"]
    assert on({"tp": 1}, llama, torch.float32, 2, most=None) != on({"tp": 2}, llama, torch.float32, 2, most=None)


def gpt2(**options: Any) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 1, "n_head": 8, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | options))


def latent() -> DeepseekV3ForCausalLM:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, num_attention_heads=8, q_lora_rank=16, kv_lora_rank=16))


def adding_heads(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    return value + torch.einsum("bhqd,bhkd->bqk", query, key).softmax(-1)[:, None] @ value, None


def into_out(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    scores = torch.empty(*query.shape[:-1], key.shape[-2])
    torch.matmul(query, key.mT, out=scores)
    return torch.matmul(other=value, input=scores.softmax(-1)).transpose(1, 2), None


def test_products_by_their_arguments_names() -> None:
    AttentionInterface.register("into_out", into_out)
    whole = Trained("phi", MODELS["Phi"].config | {"attn_implementation": "into_out"}).made()
    ids = torch.arange(16)[None]

    @torch.no_grad()
    def both(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
        return whole(ids).logits, tpcore_hf.parallelize(deepcopy(whole))(ids).logits.clone()

    torch.testing.assert_close(*run_ranks(Mesh({"tp": 2}), both, reproducible=8)[0])


def einsum() -> Any:
    AttentionInterface.register("adding_heads", adding_heads)
    config = MODELS["Phi"].config | {"attn_implementation": "adding_heads"}
    return tpcore_hf.parallelize(Trained("phi", config).made())(torch.zeros(1, 16, dtype=torch.int64))


REFUSED = {
    "another product of heads": (einsum, r"torch.einsum of .* \(1, \d, 16, 8\).*torch.matmul on batches"),
    "a vocabulary": (lambda: tpcore_hf.parallelize(gpt2(vocab_size=97)), "97 of .* are not 8 equal blocks.*to 104"),
    "latent attention": (lambda: tpcore_hf.parallelize(latent()), r"\('mla_kv_a_proj'\).*in an order of its degree"),
    "capacity": (
        lambda: tpcore_hf.parallelize(MODELS["Mixtral"].made(), expert_parallel=True, capacity_factor=1.0),
        "capacity_factor=1.0 drops choices by rank",
    ),
    "dropout": (
        lambda: tpcore_hf.parallelize(gpt2(attn_pdrop=0.1)).train()(torch.zeros(1, 16, dtype=torch.int64)),
        "draws other numbers at another degree",
    ),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_have_the_same_bits_is_refused_at_every_degree(case: str, tp: int) -> None:
    make, message = REFUSED[case]

    def refused(ctx: ParallelContext) -> bool:
        with pytest.raises(ValueError, match=message):
            make()
        return True

    assert run_ranks(Mesh({"tp": tp}), refused, reproducible=8) == [True] * tp
