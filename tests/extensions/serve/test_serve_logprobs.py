"""Log-probabilities of an engine are those of the whole model's log_softmax, whatever its batches and caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx2
import openai
import pytest
import torch
import transformers
from helpers.version_ranges import skip_below
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

skip_below("serve")  # before imports that fail there

from tpcore_serve.batches import Batches  # noqa: E402
from tpcore_serve.sampling import sample_by_request  # noqa: E402
from tpcore_serve.server import application  # noqa: E402

WORDS = 61
PROMPT = [3 + i * 7 % 50 for i in range(40)]
ROUNDING = 1e-12  # float64; of logits that other rows of a batch were multiplied with
Run = Callable[[Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(scope="module")
def model() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    config = transformers.LlamaConfig(**sizes, vocab_size=WORDS, max_position_embeddings=128, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    text = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text, unk_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module", params=["alone", "with logits of all tokens"])
def run(request: pytest.FixtureRequest, model: Any, tokenizer: Any) -> Iterator[Run]:
    """Runs a function of OpenAI's client, against an engine that runs prompts in parts and shares their blocks."""
    whole = request.param != "alone"
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(model, "_supports_logits_to_keep", lambda: False)
        settings = transformers.ContinuousBatchingConfig(
            use_async_batching=False,
            use_cuda_graph=False,
            max_batch_tokens=16,
            page_size=4,
            num_blocks=40,
            cpu_offload_space=0.0,
        )
        config = transformers.GenerationConfig(max_new_tokens=1, do_sample=False)
        engine = model.init_continuous_batching(config, settings)
        sample_by_request(engine)
        engine.start()
        app = application("tiny", model, tokenizer, Batches(engine, 100, 8))

        def run(ask: Any) -> Any:
            async def asked() -> Any:
                http = openai.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(app))
                options: Any = {"api_key": "-", "max_retries": 0, "http_client": http}
                async with openai.AsyncOpenAI(base_url="http://localhost/v1", **options) as client:
                    return await asyncio.wait_for(ask(client), 60)  # against hangs

            return asyncio.run(asked())

        yield run
        engine.stop(block=True, timeout=60, hard_stop=True)


def expected(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def compare(told: Any, model: Any, ids: list[int], first: int, tops: int) -> None:
    """``told`` of the tokens of ``ids`` from the place ``first``."""
    assert [int(text.strip()[1:]) for text in told.tokens] == ids[first:]
    scores = expected(model, ids)
    for place, value, best in zip(range(first, len(ids)), told.token_logprobs, told.top_logprobs, strict=True):
        if place == 0:
            assert value is best is None
            continue
        row = scores[place - 1]
        assert value == pytest.approx(float(row[ids[place]]), abs=ROUNDING)
        want = {f" w{i}": float(row[i]) for i in row.topk(tops).indices.tolist()} | {told.tokens[place - first]: value}
        assert best == pytest.approx(want, abs=ROUNDING)
        assert [*best][:tops] == [*want][:tops]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.7, "seed": 3}])
@pytest.mark.parametrize(("echo", "tops"), [(True, 3), (False, 0)])
def test_completions(run: Run, model: Any, options: dict[str, Any], echo: bool, tops: int) -> None:
    """Twice: the second time blocks of the prompt are in the cache."""
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "logprobs": tops, "echo": echo, **options}
    for _ in range(2):
        whole = run(lambda client: client.completions.create(**asked)).choices[0]
        ids = PROMPT + [int(word[1:]) for word in whole.text.split()[-5:]]
        assert whole.text.split() == [f"w{i}" for i in (ids if echo else ids[-5:])]
        compare(whole.logprobs, model, ids, 0 if echo else 40, tops)
        words = [whole.text[at:].split()[0] for at in whole.logprobs.text_offset]
        assert words == [text.strip() for text in whole.logprobs.tokens]

    async def streamed(client: openai.AsyncOpenAI) -> list[Any]:
        return [part.choices[0] async for part in await client.completions.create(**asked, stream=True)]

    parts = run(streamed)
    assert "".join(part.text for part in parts) == whole.text
    for name, values in whole.logprobs:
        assert [each for p in parts if p.logprobs for each in getattr(p.logprobs, name)] == values


def test_prompts_of_a_list_beside_others_and_no_answer(run: Run, model: Any) -> None:
    prompts = [PROMPT[i : i + 20] for i in range(4)]
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 1, "echo": True}

    async def both(client: openai.AsyncOpenAI) -> Any:
        plain = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
        return await asyncio.gather(client.completions.create(**asked, prompt=prompts, max_tokens=0), plain)

    answer, plain = run(both)
    for choice, ids in zip(answer.choices, prompts, strict=True):
        compare(choice.logprobs, model, ids, 0, 1)
        assert choice.finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, 80)
    assert plain.choices[0].logprobs is None


def test_a_request_that_made_room_in_a_full_cache(run: Run, model: Any) -> None:
    """Six times 44 tokens do not fit into 160: some begin again, and what was said of them stands."""
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 2, "echo": True, "max_tokens": 40}
    prompts = [PROMPT[i : i + 4] for i in range(6)]
    answer = run(lambda client: client.completions.create(**asked, prompt=prompts))
    for choice, ids in zip(answer.choices, prompts, strict=True):
        compare(choice.logprobs, model, ids + [int(word[1:]) for word in choice.text.split()[-40:]], 0, 2)


def test_chat(run: Run, model: Any) -> None:
    messages = [{"role": "user", "content": " ".join(f"w{i}" for i in PROMPT)}]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 2}
    content = run(lambda client: client.chat.completions.create(**asked)).choices[0].logprobs.content
    ids = PROMPT + [int(each.token.strip()[1:]) for each in content]
    for row, each in zip(expected(model, ids)[39:], content, strict=False):
        best = row.topk(2)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(best.values.tolist(), abs=ROUNDING)
        assert [top.token for top in each.top_logprobs] == [f" w{i}" for i in best.indices.tolist()]
        assert (each.logprob, each.token) == (each.top_logprobs[0].logprob, each.top_logprobs[0].token)
        assert bytes(each.bytes).decode() == each.token

    async def streamed(client: openai.AsyncOpenAI) -> list[Any]:
        return [part.choices[0] async for part in await client.chat.completions.create(**asked, stream=True)]

    assert [each for part in run(streamed) if part.logprobs for each in part.logprobs.content] == content
