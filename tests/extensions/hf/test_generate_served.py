"""A causal language model of transformers, traced with its cache and served: the tokens of ``generate``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import programs as forked
from helpers.hf import GPT2, T5, TINY, llama, mixtral, phi3
from helpers.tiers import tiers
from torch import Tensor, nn

import tpcore
import tpcore_hf
from tpcore import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore.trace import TensorParallelModel, generate, generate_each, parallel_model_load, parallel_model_save
from tpcore_hf.generate.cached import CachedModel
from tpcore_hf.plan.inputs import cache_argument

PROMPTS = [[5, 17, 9, 40, 41, 3, 77, 8, 23, 50, 51, 4], [30, 31, 60]]
LENGTH = 32


def whole(make: Callable[[], Any] = lambda: llama(num_key_value_heads=1)) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():  # larger than they are made, so that tokens differ from each other
            p.mul_(4)
    return model


def expected(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return made[0, len(prompt) :].tolist()


def listed(stream: Iterator[torch.Tensor]) -> list[list[int]]:
    return torch.stack(list(stream), 1).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("served")
    whole().save_pretrained(where / "whole")

    def cut() -> nn.Module:
        with tpcore.lazy():
            model = transformers.AutoModelForCausalLM.from_pretrained(where / "whole")
        return tpcore.parallelize(model)

    with tpcore_hf.trace_causal_lm(
        cut, 2, max_length=LENGTH, prompt_lengths=(5,), batch_size=2, backend="cpu_gloo"
    ) as model:
        parallel_model_save(model, where / "traced")
    return where / "traced"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[TensorParallelModel]:
    with parallel_model_load(folder, timeout=60, restart=True) as model:
        yield model


pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("generate_served"),
    pytest.mark.usefixtures("default_checks"),
]


@pytest.mark.slow
def test_prompts_of_two_lengths_and_more_tokens_than_a_call_takes(served: TensorParallelModel) -> None:
    model = whole()
    want = [expected(model, prompt, 12) for prompt in PROMPTS]
    assert want[0] != want[1]
    assert len(set(want[0])) > 3
    assert listed(generate(served, PROMPTS, max_new_tokens=12)) == want
    # a row of the cache that has been used before begins anew
    assert listed(generate(served, PROMPTS[1:], max_new_tokens=12)) == want[1:]


def test_the_cache_is_filled_to_its_last_place(served: TensorParallelModel) -> None:
    n = LENGTH - len(PROMPTS[0])
    assert listed(generate(served, PROMPTS[:1], max_new_tokens=n)) == [expected(whole(), PROMPTS[0], n)]


def test_rows_end_at_stop_tokens(served: TensorParallelModel) -> None:
    first, second = listed(generate(served, PROMPTS, max_new_tokens=8))
    stop = second[2]
    got = listed(generate(served, PROMPTS, max_new_tokens=8, stop_tokens=[stop]))
    at = second.index(stop)
    assert got[1] == second[: at + 1] + [stop] * (len(got[1]) - at - 1)
    assert got[0][: at + 1] == first[: at + 1]
    alone = listed(generate(served, PROMPTS[1:], max_new_tokens=8, stop_tokens=[stop]))
    assert alone == [second[: at + 1]]


def test_a_choice_of_ones_own(served: TensorParallelModel) -> None:
    def least(logits: torch.Tensor) -> torch.Tensor:
        return logits.argmin(-1)

    model, ids = whole(), torch.tensor([PROMPTS[1]])
    want = []
    for _ in range(3):
        with torch.no_grad():
            token = model(ids).logits[:, -1].argmin(-1)
        want.append(int(token))
        ids = torch.cat([ids, token[:, None]], 1)
    assert listed(generate(served, ids[:, :3], max_new_tokens=3, choose=least)) == [want]


def test_another_generation_ends_the_first(served: TensorParallelModel) -> None:
    first = generate(served, PROMPTS, max_new_tokens=8)
    next(first)
    second = generate(served, PROMPTS, max_new_tokens=8)
    next(second)
    with pytest.raises(RuntimeError, match="another has begun"):
        next(first)
    next(second)


@pytest.mark.slow
def test_processes_that_were_started_again_have_forgotten(served: TensorParallelModel) -> None:
    stream = generate(served, PROMPTS, max_new_tokens=8)
    next(stream)
    served._workers._processes.all[1].kill()
    with pytest.raises(tpcore.PeerLostError):
        next(stream)
    stream = generate(served, PROMPTS, max_new_tokens=8)
    before = next(stream)
    served.replace_weights(whole().state_dict())
    with pytest.raises(RuntimeError, match="weights were replaced"):
        next(stream)
    assert torch.equal(next(generate(served, PROMPTS, max_new_tokens=8)), before)


def test_rows_that_end_take_the_next_prompt(served: TensorParallelModel) -> None:
    """Seven prompts of 1 to 14 tokens over two rows, whose answers end at a token or after twelve."""
    numbers, model = torch.Generator().manual_seed(2), whole()
    prompts = [torch.randint(1, 99, (n,), generator=numbers).tolist() for n in (14, 2, 7, 1, 5, 12, 3)]
    want = [expected(model, prompt, 12) for prompt in prompts]
    stop = want[2][4]
    ended = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in want]
    assert len({len(tokens) for tokens in ended}) > 1
    found: list[list[int]] = [[] for _ in prompts]
    order = []
    for number, token in generate_each(served, prompts, max_new_tokens=12, stop_tokens=[stop]):
        found[number].append(token)
        order.append(number)
    assert found == ended
    last = [len(order) - 1 - order[::-1].index(number) for number in range(len(prompts))]
    assert any(order.index(number + 2) < last[number + 1] for number in range(5))  # beside one that has not ended


def test_what_does_not_fit_is_refused_before_any_call(served: TensorParallelModel) -> None:
    with pytest.raises(ValueError, match="the cache has 2 rows"):
        generate(served, [*PROMPTS, [1]], max_new_tokens=1)
    with pytest.raises(ValueError, match=f"prompt of 12.*holds {LENGTH} tokens"):
        generate(served, PROMPTS, max_new_tokens=LENGTH - 11)
    with pytest.raises(ValueError, match="a prompt has a token or more"):
        generate(served, [[]], max_new_tokens=1)
    with pytest.raises(
        ValueError, match=r"max_new_tokens=2\.5 after a prompt of 12"
    ):  # which no count of tokens equals
        generate(served, PROMPTS, max_new_tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"prompt=\[1\.7\]: a list of token ids"):
        generate(served, [[1.7]], max_new_tokens=1)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"stop_tokens=\[\[7\]\]: a list of token ids"):
        generate(served, PROMPTS, max_new_tokens=1, stop_tokens=[[7]])  # type: ignore[list-item]


def test_stop_tokens_may_be_a_tensor(served: TensorParallelModel) -> None:
    answer = [token for _, token in generate_each(served, PROMPTS[:1], max_new_tokens=4)]
    stops = torch.tensor(answer[:1])
    assert len(list(generate_each(served, PROMPTS[:1], max_new_tokens=4, stop_tokens=stops))) == 1  # type: ignore[arg-type]


WITHOUT = """
import sys
sys.modules["transformers"] = None
from tpcore.trace import generate, parallel_model_load
with parallel_model_load(sys.argv[1]) as model:
    print([t.tolist() for t in generate(model, [[30, 31, 60]], max_new_tokens=4)])
"""


@pytest.mark.slow
def test_it_is_served_without_transformers(folder: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=forked.PATIENCE,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str([[t] for t in expected(whole(), PROMPTS[1], 4)])


# -- on threads: which families can -------------------------------------------------------------------------

T = transformers
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(num_key_value_heads=1),
    "gpt2, with a table of positions": lambda: T.GPT2LMHeadModel(T.GPT2Config(**GPT2)),
    "gemma3, with two kinds of layers": lambda: T.Gemma3ForCausalLM(
        T.Gemma3TextConfig(**TINY, num_key_value_heads=2, head_dim=8, sliding_window=32)
    ),
    "phi3, with one projection of queries, keys and values": phi3,
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "tokens"])
def test_rows_of_a_cache_equal_the_whole(name: str, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    ids = torch.tensor([PROMPTS[0][:6], PROMPTS[0][6:]])
    with torch.no_grad():
        want = model(ids).logits

    def rank(ctx: tpcore.ParallelContext) -> None:
        torch.manual_seed(0)
        cut = tpcore.parallelize(FAMILIES[name](), sequence_parallel=sequence_parallel)
        cached = CachedModel(cut, 16, 2)
        with torch.no_grad():
            # the second row has two tokens fewer, and padding in their place
            first = cached(ids[:, :4], torch.zeros(2, dtype=torch.long), torch.tensor([3, 1]))[0]
            second = cached(ids[:, 4:5], torch.tensor([4, 4]), torch.zeros(2, dtype=torch.long))[0]
        # float32: the order of sums
        torch.testing.assert_close(first[0], want[0, 3], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first[1], want[1, 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(second[0], want[0, 4], rtol=1e-4, atol=1e-4)

    run_ranks(Mesh({"tp": 2}), rank)


def refused(make: Callable[[], Any], max_length: int, match: str) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        with pytest.raises(ValueError, match=match):
            CachedModel(make(), max_length, 1)

    run_ranks(Mesh({"tp": 1}), rank)


def test_a_model_that_counts_positions_by_itself_is_refused() -> None:
    class Counting(T.LlamaForCausalLM):
        def forward(self, input_ids: Any, position_ids: Any = None, **kw: Any) -> Any:
            own = torch.arange(input_ids.shape[1])[None]
            return super().forward(input_ids, position_ids=own, **kw)

    refused(lambda: Counting(llama().config), 16, "logits differ by")


class _Passing(T.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class _Old(T.LlamaForCausalLM):
    def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **{cache_argument(llama()): past_key_values}, **kwargs)


class _Both(T.LlamaForCausalLM):
    def forward(self, input_ids: Any, cache: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        given = past_key_values if cache is None else cache
        return super().forward(input_ids, **{cache_argument(llama()): given}, **kwargs)


class _Keeping(T.LlamaForCausalLM):
    def forward(self, input_ids: Any, use_cache: bool = True) -> Any:
        return super().forward(input_ids, use_cache=use_cache)


@pytest.mark.parametrize("kind", [_Passing, _Old, _Both])
def test_a_forward_of_ones_own_has_its_cache(kind: type) -> None:
    """By whatever name it takes it, and where it passes on what it does not name."""

    config = llama().config

    def rank(ctx: ParallelContext) -> Tensor:
        torch.manual_seed(0)
        cached = CachedModel(kind(config), 16, 1)
        with torch.no_grad():
            return cached(torch.tensor([PROMPTS[0][:4]]), torch.zeros(1, dtype=torch.long), torch.tensor([3]))[0]

    torch.manual_seed(0)
    with torch.no_grad():
        want = T.LlamaForCausalLM(config).eval()(torch.tensor([PROMPTS[0][:4]])).logits[:, -1]
    torch.testing.assert_close(run_ranks(Mesh({"tp": 1}), rank)[0], want, rtol=1e-4, atol=1e-4)  # float32


def test_a_forward_without_a_cache_is_refused() -> None:
    refused(lambda: _Keeping(llama().config), 16, "_Keeping is no causal language model that takes a cache")


def test_models_that_keep_something_else_are_refused() -> None:
    refused(llama, 65, "max_position_embeddings=64 positions; choose 64")
    mistral = T.MistralConfig(**TINY, num_key_value_heads=2, sliding_window=8)
    refused(lambda: T.MistralForCausalLM(mistral), 16, "sliding_window=8")
    assert run_ranks(Mesh({"tp": 1}), lambda _: CachedModel(T.MistralForCausalLM(mistral), 8, 1).max_length) == [8]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope["original_max_position_embeddings"] = 8
    refused(lambda: llama(rope_parameters=rope), 16, "original_max_position_embeddings=8 positions, after")
    llama4 = T.Llama4TextConfig(**TINY, num_key_value_heads=2, head_dim=8, attention_chunk_size=8, num_local_experts=2)
    refused(lambda: T.Llama4ForCausalLM(llama4), 16, "attention_chunk_size=8 tokens in a chunk of its attention")
    refused(lambda: T.BertModel(T.BertConfig(**TINY)), 16, "no causal language model")
    refused(lambda: T.T5ForConditionalGeneration(T.T5Config(**T5)), 16, "no causal language model")
    mamba = T.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1)
    refused(lambda: T.MambaForCausalLM(mamba), 16, "no causal language model")
    bloom = T.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    refused(lambda: T.BloomForCausalLM(bloom), 16, "BloomForCausalLM takes no cache of keys and values alone")


def _experts() -> Any:
    return whole(lambda: mixtral(num_local_experts=8, experts_implementation=None))


@pytest.mark.parametrize(
    "options",
    tiers((), [{"expert_parallel": True}], [{"capacity_factor": 0.75}]),
    ids=["experts", "features, of a capacity"],
)
def test_a_model_of_experts_is_traced_and_served(options: dict[str, Any], tmp_path: Path) -> None:
    lengths: dict[str, Any] = {"max_length": LENGTH, "prompt_lengths": (8,), "backend": "cpu_gloo"}
    with tpcore_hf.trace_causal_lm(lambda: tpcore.parallelize(_experts(), **options), 2, **lengths) as model:
        parallel_model_save(model, tmp_path / "traced")

    def alone(ctx: tpcore.ParallelContext) -> list[int]:
        kept = options if "capacity_factor" in options else {}
        return expected(tpcore.parallelize(_experts(), **kept), PROMPTS[0][:8], 12)

    (want,) = run_ranks(Mesh({"tp": 1}), alone)
    assert "capacity_factor" not in options or want != expected(_experts(), PROMPTS[0][:8], 12)  # it drops some
    with parallel_model_load(tmp_path / "traced", timeout=60) as model:
        assert listed(generate(model, [PROMPTS[0][:8]], max_new_tokens=12)) == [want]
