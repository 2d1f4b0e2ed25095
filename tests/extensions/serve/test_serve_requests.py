"""What requests to ``tpcore serve`` may say, how their tokens are drawn and where they end; without a server."""

from __future__ import annotations

import asyncio
import json
import re
import types
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from helpers.version_ranges import skip_below
from tokenizers import Tokenizer, models
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    GenerationOutput,
    RequestState,
    RequestStatus,
)

from tpcore_serve.batches import Stream
from tpcore_serve.requests import malformed
from tpcore_serve.sampling import Sampling, choose
from tpcore_serve.server import failure
from tpcore_serve.text import Text

skip_below("serve")

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body must be a JSON object, not list"),
        ({**CHAT, "max_tokens": 0}, "max_tokens=0 is not a whole number from 1"),
        ({**CHAT, "n": 2}, "n=2 is not supported: leave it out"),
        ({**CHAT, "odd": 1}, "there is no option odd"),
        ({**CHAT, "temperature": "hot"}, "temperature='hot' is not a number from 0 to 2"),
        ({**CHAT, "temperature": True}, "temperature=True is not a number"),
        ({**CHAT, "top_p": 0}, "top_p=0 leaves no token"),
        ({**CHAT, "seed": -1}, "seed=-1 is not a whole number from 0"),
        ({**CHAT, "stream": "yes"}, "stream='yes' is not true or false"),
        ({**CHAT, "stop": [""]}, r"stop=\[''\] is not a string or a list of strings"),
        ({**CHAT, "stop": list("abcde")}, "stop=.* is not a string or a list of strings, at most 4"),
        ({**CHAT, "tools": ["x"]}, r"tools=\['x'\] is not a list of objects"),
        ({**CHAT, "chat_template_kwargs": {"chat_template": "x"}}, "has chat_template, which the server says itself"),
        ({"messages": [{"role": "user", "content": 0}]}, r"content of messages\[0\] must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls of messages\[0\] must be objects"),
        ({**CHAT, "chat_template_kwargs": 1}, "chat_template_kwargs=1 is not an object"),
        *(({"prompt": value}, f"^prompt={value} is not a string") for value in (4, 1.7, True, {})),
        *(
            ({"prompt": [7] * 300 + [token]}, re.escape(f"prompt[300]={token!r} is not a string"))
            for token in (1.7, 1.0, -0.0, True, -1, None, float("inf"), [], [[1]], [1, 2.5], "")
        ),
        *(({"prompt": "x", "logprobs": n}, f"logprobs={n} is not a whole number from 0 to 5") for n in (-1, 6, True)),
        *(({**CHAT, "logprobs": n}, f"logprobs={n} is not true or false") for n in (0, 2)),
        *(
            ({**CHAT, "logprobs": True, "top_logprobs": n}, f"top_logprobs={n} is not a whole number from 0 to 20")
            for n in (-1, 21)
        ),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs is given without logprobs=true"),
        ({"prompt": "x", "echo": 1}, "echo=1 is not true or false"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens=0 is not a whole number from 1"),
        ({"prompt": "x", "suffix": "x"}, "suffix='x' is not supported"),
        ({"messages": []}, "messages must be a list of one or more messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, r"messages\[0\] must be an object whose role is one of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"content of messages\[0\] must be text",
        ),
    ],
)
def test_malformed(body: Any, message: str) -> None:
    said = malformed(body, "messages" if "prompt" not in body else "prompt")
    assert said is not None
    assert re.search(message, said)


LONG = "x" * 2000


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"chat_template_kwargs": {"chat_template": LONG}}, "has chat_template, which the server says itself"),
        ({"tools": [LONG]}, " ... is not a list of objects"),
        ({"stop": [LONG] * 5}, " ... is not a string or a list of strings, at most 4"),
        ({"response_format": {"type": LONG}}, " ... is not supported: leave it out"),
    ],
)
def test_the_reason_is_told_after_a_long_value(option: dict[str, Any], reason: str) -> None:
    said = malformed(CHAT | option, "messages")
    assert said is not None
    assert json.loads(bytes(failure(400, said).body))["error"]["message"].endswith(reason)


def test_what_is_well_formed_passes() -> None:
    parts = [{"type": "text", "text": "hello"}]
    assert malformed({"messages": [{"role": "user", "content": parts}], "n": 1, "temperature": 0.5}, "messages") is None
    assert malformed({"prompt": "hello", "stop": "x", "stream": True, "logprobs": False}, "prompt") is None
    assert malformed({"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 5}, "prompt") is None
    assert malformed({**CHAT, "logprobs": True, "top_logprobs": 20}, "messages") is None
    assert malformed({**CHAT, "logprobs": False, "top_logprobs": 0}, "messages") is None  # as some clients always send


@pytest.mark.parametrize(
    ("tokens", "stops", "end"),
    [([5, 7], [], False), ([5, 6], [], True), ([6], [], True), ([5, 7], ["w3"], True), ([5, 7], ["w1 w"], True)],
)
def test_an_answer_whose_last_token_ends_it_is_no_answer_cut_short(
    tokens: list[int], stops: list[str], end: bool
) -> None:
    text = Tokenizer(models.WordLevel({f"w{i}": i + 4 for i in range(8)}, unk_token="w0"))
    config = transformers.GenerationConfig(max_new_tokens=2, eos_token_id=[6], stop_strings=stops)
    engine = types.SimpleNamespace(
        cancel_request=lambda _: None, output_router=types.SimpleNamespace(result_handlers={})
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text, unk_token="w0")
    stream = Stream(
        engine, "one", Text(tokenizer, [], special=False), None, asyncio.Queue(), config=config, totals=Counter()
    )
    stream.take(GenerationOutput("one", generated_tokens=tokens, status=RequestStatus.FINISHED))
    assert (config.max_new_tokens is None) == end


def test_a_request_that_made_room_goes_on_with_the_same_numbers() -> None:
    scores, sampling = torch.zeros(1, 64), Sampling()

    def token(state: RequestState) -> int:
        return int(sampling(scores, sampling.prepare_tensor_args([FutureRequestState(state, True, {}, 1)])).argmax())

    for seed in range(8):
        how = {"temperature": 1.0, "seed": seed}
        before = RequestState("one", initial_tokens=[1, 2, 3], generated_tokens=[4, 5], logit_processor_kwargs=how)
        assert token(before) == token(before.create_equivalent_initial_request())


def test_tokens_are_drawn_as_the_distribution_says() -> None:
    """Against softmax by hand: of 4,000 draws, four standard deviations of a share are at most 0.032."""
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])

    def shares(**how: Any) -> torch.Tensor:
        drawn = torch.tensor([int(choose(scores, 0, seed=seed, **how)) for seed in range(4000)])
        return torch.bincount(drawn, minlength=4) / 4000

    torch.testing.assert_close(shares(temperature=0.7), (scores / 0.7).softmax(0), rtol=0, atol=0.032)
    two = torch.cat([scores[:2].softmax(0), torch.zeros(2)])
    torch.testing.assert_close(shares(temperature=1.0, top_k=2), two, rtol=0, atol=0.032)
    # the shares are 0.64, 0.24, 0.09, 0.03: the fewest that sum to 0.7 are two
    torch.testing.assert_close(shares(temperature=1.0, top_p=0.7), two, rtol=0, atol=0.032)
    assert int(choose(scores, 3)) == int(choose(scores, 3, temperature=1e-60)) == 0
    assert int(choose(scores, 3, temperature=1.0, top_p=1e-300)) == 0  # which float32 has not
