"""transformers' continuous batching on a sharded model: each request's tokens are those of ``generate`` alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from helpers.rank_pool import RankPool
from helpers.worlds import each_rank

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.testing import run_ranks
from tpcore_hf.generate.alike import LENGTH, ROWS, cache_config, heads_of_rank

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*monitored_barrier|.*is deprecated"),  # transformers' own
]
NEW, LENGTHS = 12, (5, 17, 9, 33, 12, 7)


def model(kv: int, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": kv, "intermediate_size": 96}
    config = transformers.LlamaConfig(**sizes, vocab_size=199, num_hidden_layers=2, eos_token_id=None, **options)
    return transformers.LlamaForCausalLM(config).eval()


def prompts() -> list[list[int]]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(3, 199, (n,), generator=numbers).tolist() for n in LENGTHS]


def greedy() -> Any:
    return transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)


def batched(model: Any, **options: Any) -> list[list[int]]:
    answers = model.generate_batch(prompts(), generation_config=greedy(), **options).values()
    ordered = sorted(answers, key=lambda answer: int(answer.request_id.rpartition("_")[2]))
    return [list(answer.generated_tokens) for answer in ordered]


def _rank(ctx: tpcore.ParallelContext, kv: int) -> tuple[list[list[int]], int]:
    sharded = tpcore.parallelize(model(kv))
    found = batched(sharded)
    assert "_device_mesh" not in vars(sharded)
    return found, sharded.config.num_key_value_heads


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as ranks:
        yield ranks


def _whole_attention(ctx: tpcore.ParallelContext) -> list[list[int]]:
    """Which has all heads in its cache."""
    plan = dict.fromkeys([f"model.layers.*.self_attn.{name}_proj" for name in "qkvo"], "replicate")
    return batched(tpcore.parallelize(model(4), plan=plan))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("pool", "kv"), [(2, 4), pytest.param(2, 1, marks=SLOW), pytest.param(4, 2, marks=SLOW)], indirect=["pool"]
)
def test_tokens_are_those_of_generate(pool: RankPool, kv: int) -> None:
    dense, want = model(kv), []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        answer = dense.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy())
        want.append(answer[0, len(prompt) :].tolist())
    mesh = Mesh({"dp": 1, "tp": pool.size})
    assert pool.run(mesh, _rank, kv)[0] == (want, kv)  # rank 0 takes the requests; the configuration is as it was
    assert kv != 4 or pool.run(mesh, _whole_attention)[0] == want


@each_rank(dp=1, tp=2)
def test_caches_take_what_the_requests_need_and_what_fits(ctx: tpcore.ParallelContext) -> None:
    sharded = tpcore.parallelize(model(4))
    heads = heads_of_rank(sharded)
    assert heads == 2
    settings = cache_config(None, sharded, None, heads, ctx)
    page = "page_size" if hasattr(settings, "page_size") else "block_size"  # before 5.23
    assert settings.num_blocks == ROWS * (1 + LENGTH // getattr(settings, page))
    large = transformers.ContinuousBatchingConfig(**{page: 2**30})  # a block of more than 2^38 bytes
    assert cache_config(large, sharded, None, heads, ctx).num_blocks == 1
    assert large.num_blocks is None  # the caller's is as it was: another call has other requests
    given = transformers.ContinuousBatchingConfig(num_blocks=7, max_batch_tokens=9)
    sized = cache_config(given, sharded, None, heads, ctx)
    assert (sized.num_blocks, sized.max_batch_tokens) == (7, 9)


@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_meshes_whose_ranks_would_wait_for_one_another_are_refused(axis: str) -> None:
    cuts = {"num_microbatches": 1} if axis == "pp" else {}

    def rank(ctx: tpcore.ParallelContext) -> None:
        with pytest.raises(ValueError, match=f"continuous batching over {axis}: each tp group steps by itself"):
            batched(tpcore.parallelize(model(4), **cuts))

    run_ranks(Mesh({"pp": 1, "dp": 1, "tp": 1} | {axis: 2}), rank)


@each_rank(dp=1, tp=2)
def test_without_process_groups_it_says_what_to_call(ctx: tpcore.ParallelContext) -> None:
    with pytest.raises(tpcore.BackendError, match="a DeviceMesh needs a backend over torch"):
        batched(tpcore.parallelize(model(4)))


BLOOM = {"vocab_size": 99, "hidden_size": 32, "n_layer": 1, "n_head": 4}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 99}
GEMMA = HEADS | {"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 2}
DENSE = HEADS | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**BLOOM)),
            "BloomForCausalLM (has attention of its own|asks something else of its cache)",
        ),
        (
            lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DENSE, **LATENT)),
            r"keys and values of sizes \[\(\d+, \d+\)\], and the cache one of 4",
        ),
        (
            lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GEMMA)),
            r"Gemma2ForCausalLM has capped scores, which its attention '(paged\|eager|(paged\|)?sdpa)' leaves out",
        ),
    ],
    ids=["keys and values that never come to the cache", "of another size", "capped scores"],
)
def test_models_whose_tokens_would_be_others_are_refused(make: Any, why: str) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        sharded = tpcore.parallelize(make())
        before = sharded.config._attn_implementation
        with pytest.raises(ValueError, match=why):
            batched(sharded)
        assert sharded.config._attn_implementation == before

    run_ranks(Mesh({"dp": 1, "tp": 1}), rank)
