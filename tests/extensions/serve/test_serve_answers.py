"""What ``tpcore serve`` answers, from tokens of a script: reasoning, calls of tools and text, streamed or not."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
import transformers
from helpers.version_ranges import skip_below
from tokenizers import Tokenizer, models, pre_tokenizers

skip_below("serve")  # before imports that fail there

from transformers.generation.continuous_batching import ContinuousBatchingManager  # noqa: E402
from transformers.generation.continuous_batching.continuous_api import OutputRouter  # noqa: E402

from tpcore_serve import rank  # noqa: E402
from tpcore_serve.batches import Batches  # noqa: E402
from tpcore_serve.server import application  # noqa: E402

CALL = '{"name":"f","arguments":{"x":1}}'
REPLIES = {
    "w1": ["<think>", "r1", "r2", "</think>", "c1", "c2", "c3", "c4", "</s>"],
    "w2": ["d1", "<call>", CALL, "</call>", "</s>"],
    "w3": ["e1", "<call>", "{oops", "</call>", "</s>"],
    "w4": ["f1", "f2", "f3", "f4", "</s>"],
    "w5": ["e1", "<call>", "{oops", "</s>"],
    "w6": ["e1", "<call>", '{"name":5,"arguments":{}}', "</call>", "</s>"],
    "w7": ["d1", "<call>", f"[{CALL},{CALL}]", "</call>", "</s>"],
    "unanchored": ["d1", "</s>"],
}
WORDS = ["<unk>", *dict.fromkeys(word for prompt, reply in REPLIES.items() for word in (prompt, *reply))]
FIELDS = {
    "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
    "tool_calls": {
        "open_pattern": r"\s*<call>",
        "close": "</call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "content": {"close_pattern": r"\s*</s>", "content": "text"},
}
Run = Callable[[Callable[[openai.AsyncOpenAI, "Script"], Coroutine[Any, Any, Any]]], Any]


class Script:
    """An engine that gives all its requests their next token at once, through transformers' router."""

    register_result_handler = ContinuousBatchingManager.register_result_handler

    def __init__(self) -> None:
        self.output_router, self.batch_processor = OutputRouter(), None
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.step, self.waits_for, self.error = 0, 1, ""  # the error comes in the turn of the first token

    def is_running(self) -> bool:
        return True

    def cancel_request(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def add_request(self, ids: list[int], request_id: str, max_new_tokens: int, **_: Any) -> str:
        reply = [WORDS.index(word) for word in REPLIES[WORDS[ids[-1]]]]
        self.requests[request_id] = reply[:max_new_tokens], len(reply[:max_new_tokens])
        if len(self.requests) == self.waits_for:
            self.answer()
        return request_id

    def answer(self) -> None:
        """One token more for each request."""
        self.step += 1
        self._deliver(None)
        if self.error:
            self._deliver(self.error)
        if self.requests:
            asyncio.get_running_loop().call_soon(self.answer)

    def _deliver(self, error: str | None) -> None:
        outputs = []
        for request_id, (tokens, most) in [*self.requests.items()]:
            over = self.step == most
            output = {"request_id": request_id, "generated_tokens": tokens[: self.step], "error": error}
            outputs.append(SimpleNamespace(**output, is_finished=lambda over=over: over or error is not None))
            if over or error is not None:
                del self.requests[request_id]
        self.output_router.deliver_batch(outputs)


def served(fields: dict[str, Any], key: str = "") -> tuple[Any, Script, Batches]:
    """The application, and the engine behind it."""
    text = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor_pattern": r"w\d", "fields": fields}
    ends = transformers.GenerationConfig(eos_token_id=WORDS.index("</s>"))
    model = SimpleNamespace(generation_config=ends, config=SimpleNamespace(model_type="none"))
    engine = Script()
    batches = Batches(engine, 64, 8)
    return application("org/tiny", model, tokenizer, batches, key=key), engine, batches


@pytest.fixture
def web() -> tuple[Any, Script, Batches]:
    return served(FIELDS)


@pytest.fixture
def run(web: tuple[Any, Script, Batches]) -> Run:
    return asking(web)


def asking(web: tuple[Any, Script, Batches]) -> Run:
    """Runs a function of OpenAI's client and the engine behind it."""
    app, engine, _ = web

    def run(ask: Any) -> Any:
        async def asked() -> Any:
            transport = httpx2.ASGITransport(app)
            http = openai.DefaultAsyncHttpxClient(transport=transport)
            options: Any = {"api_key": "-", "max_retries": 0, "http_client": http}
            async with openai.AsyncOpenAI(base_url="http://localhost/v1", **options) as c:
                answer = await asyncio.wait_for(ask(c, engine), 60)  # against hangs
            assert not engine.output_router.result_handlers
            return answer

        return asyncio.run(asked())

    return run


Answer = tuple[str, str, list[str], str, int]
"""Text, reasoning, calls of tools, the reason of the end, tokens."""


def _request(prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "org/tiny", "messages": messages, "temperature": 0, "max_tokens": 20} | options


async def whole(client: openai.AsyncOpenAI, prompt: str, **options: Any) -> Answer:
    answer = await client.chat.completions.create(**_request(prompt, options))
    (choice,) = answer.choices
    message: Any = choice.message
    calls = [f"{call.function.name} {call.function.arguments}" for call in message.tool_calls or []]
    thought = getattr(message, "reasoning_content", None) or ""
    return message.content, thought, calls, choice.finish_reason, answer.usage.completion_tokens


async def streamed(client: openai.AsyncOpenAI, prompt: str, **options: Any) -> Answer:
    text, thought, calls, reason, tokens = "", "", [], "", 0
    async for part in await client.chat.completions.create(**_request(prompt, options), stream=True):
        delta: Any = part.choices[0].delta
        text, thought = text + (delta.content or ""), thought + (getattr(delta, "reasoning_content", None) or "")
        calls += [f"{call.function.name} {call.function.arguments}" for call in delta.tool_calls or []]
        reason = part.choices[0].finish_reason or reason
        tokens = part.usage.completion_tokens if part.usage else tokens
    return text, thought, calls, reason, tokens


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("prompt", "options", "want"),
    [
        ("w1", {}, (" c1 c2 c3 c4", " r1 r2 ", [], "stop", 9)),
        ("w1", {"stop": "c3"}, (" c1 c2 ", " r1 r2 ", [], "stop", 7)),
        ("w1", {"stop": ["never", "1 c"]}, (" c", " r1 r2 ", [], "stop", 6)),
        ("w1", {"stop": "r2"}, ("", " r1 ", [], "stop", 3)),
        ("w1", {"max_tokens": 6}, (" c1 c2", " r1 r2 ", [], "length", 6)),
        ("w2", {}, ("d1", "", ['f {"x": 1}'], "tool_calls", 5)),
        ("w2", {"max_tokens": 2}, ("d1", "", [], "length", 2)),
        ("w3", {"max_tokens": 3}, ("e1", "", [], "length", 3)),  # in the midst of a call
        ("unanchored", {}, ("d1", "", [], "stop", 2)),
    ],
)
def test_an_answer_is_what_its_stream_has(run: Run, ask: Any, prompt: str, options: Any, want: Answer) -> None:
    assert run(lambda client, _: ask(client, prompt, **options)) == want


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_region_of_several_calls(ask: Any) -> None:
    each = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
    calls = FIELDS["tool_calls"] | {"transform_each": True, "transform": each}
    run = asking(served(FIELDS | {"tool_calls": calls}))
    assert run(lambda client, _: ask(client, "w7")) == ("d1", "", ['f {"x": 1}'] * 2, "tool_calls", 5)


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("prompt", ["w3", "w5", "w6"])
def test_a_call_that_no_parser_takes_fails_its_request_alone(run: Run, ask: Any, prompt: str) -> None:
    async def both(client: openai.AsyncOpenAI, engine: Script) -> Any:
        engine.waits_for = 2
        return await asyncio.gather(ask(client, prompt), streamed(client, "w4"), return_exceptions=True)

    failed, other = run(both)
    assert isinstance(failed, openai.APIError)
    assert "the model's answer is not as its template says: " in failed.message
    assert ask is streamed or failed.status_code == 500
    assert other == ("f1 f2 f3 f4", "", [], "stop", 5)


def test_an_error_that_comes_with_text_is_told(run: Run) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Script) -> list[Any]:
        engine.error = "rank 1 went\nand more"
        parts = await client.completions.create(model="org/tiny", prompt="w4", temperature=0, stream=True)
        first = await anext(aiter(parts))
        with pytest.raises(openai.APIError) as caught:
            await anext(aiter(parts))
        body: Any = caught.value.body
        return [first.choices[0].text, caught.value.message, body["code"]]

    assert run(ask) == [" f1", "a rank failed, and the ranks start again: rank 1 went", 503]


@pytest.mark.parametrize("stream", [False, True])
def test_a_signal_ends_what_is_not_answered_in_time(
    web: tuple[Any, Script, Batches], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, engine, batches = web
    engine.waits_for = 2  # another request, which does not come
    monkeypatch.setattr(rank, "_PATIENCE", 0)
    ready, write = os.pipe()

    async def ask(listener: socket.socket) -> openai.APIError:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        serving = asyncio.ensure_future(rank._served(app, engine, batches, listener, write))
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as client:
            asked = asyncio.ensure_future((streamed if stream else whole)(client, "w4"))
            while not engine.requests:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(openai.APIError) as caught:
                await asked
        assert await asyncio.wait_for(serving, 60)
        return caught.value

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # as a rank has it: uvicorn raises the signal again
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            error: Any = asyncio.run(ask(listener))
            assert "the server was told to end before this answer was complete" in error.message
            assert stream or error.status_code == 503
        assert os.read(ready, 1) == b"1"
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(ready)
        os.close(write)


def test_a_model_is_found_by_its_name(run: Run) -> None:
    async def ask(client: openai.AsyncOpenAI, _: Script) -> Any:
        with pytest.raises(openai.NotFoundError, match="there is no model 'other', only 'org/tiny'"):
            await client.models.retrieve("other")
        return await client.models.retrieve("org/tiny"), (await client.models.list()).data

    one, listed = run(ask)
    assert [one] == listed
    assert (one.id, one.object) == ("org/tiny", "model")
    assert one.created > 0


def test_options_of_the_other_endpoint_are_named(run: Run) -> None:
    async def ask(client: openai.AsyncOpenAI, _: Script) -> list[tuple[int, str]]:
        told = []
        for kind, body in [
            ("completions", {"prompt": "w1", "max_completion_tokens": 4}),
            ("completions", {"prompt": "w1", "max_completion_tokens": 4, "tools": []}),
            ("chat/completions", {"messages": [{"role": "user", "content": "w1"}], "echo": False}),
        ]:
            answer = await client._client.post(f"http://localhost/v1/{kind}", json=body)
            told.append((answer.status_code, answer.json()["error"]["message"]))
        half = {"content": rb'{"prompt": "\ud800"}', "headers": {"content-type": "application/json"}}  # of a pair
        answer = await client._client.post("http://localhost/v1/completions", **half)
        assert "the body is not JSON" in answer.json()["error"]["message"]
        return told

    assert run(ask) == [
        (400, "completions have no option max_completion_tokens: max_tokens is their limit"),
        (400, "completions have no option max_completion_tokens, tools"),
        (400, "chat completions have no option echo"),
    ]


def test_text_ends_at_the_string_that_comes_first(run: Run) -> None:
    """Not at the first of the list, in a piece of text that has both."""
    assert run(lambda client, _: whole(client, "w4", stop=["1", "f"])) == ("", "", [], "stop", 1)


def test_one_request_more_than_may_be_open_is_refused(run: Run) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Script) -> list[Answer]:
        engine.waits_for = 8
        most = [asyncio.ensure_future(whole(client, "w4")) for _ in range(7)]
        while len(engine.requests) < 7:
            await asyncio.sleep(0.01)
        last = asyncio.ensure_future(whole(client, "w4"))  # all are answered now, token by token
        while len(engine.output_router.result_handlers) < 8:
            await asyncio.sleep(0)
        with pytest.raises(openai.RateLimitError, match="8 requests are open, and no more are taken"):
            await whole(client, "w4")
        return await asyncio.gather(*most, last)

    assert len(run(ask)) == 8


def test_a_prompt_leaves_room_for_one_token_or_more(run: Run) -> None:
    """Of the 64 tokens of prompt and answer."""

    async def ask(client: openai.AsyncOpenAI, _: Script) -> Answer:
        with pytest.raises(openai.BadRequestError, match="prompt has 64 tokens, and prompt and answer may have 64"):
            await whole(client, " ".join(["w4"] * 64))
        return await whole(client, " ".join(["w4"] * 63))

    assert run(ask) == ("f1", "", [], "length", 1)
