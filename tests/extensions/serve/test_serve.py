"""``tpcore serve``: OpenAI's client against two ranks. Tokens are those of ``generate``, whatever happens to others:
malformed requests, clients that leave, in drills killed ranks and many requests."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from helpers import programs as forked
from helpers.tiers import tiers
from helpers.version_ranges import skip_below
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from tpcore.cli.app import app

skip_below("serve")

WORDS, NEW = 61, 8  # with four special ones an odd number, which two ranks pad
LONG = 400
pytestmark = pytest.mark.usefixtures("default_checks")
SERVED = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("serve")]
CLIENTS = 4
PATIENCE = 240  # seconds for new ranks, on a machine that does much else
GROWTH = 6  # MiB of a rank in 10,000 requests: outputs that were kept on the second rank were 11, and 1 on the first


def limit(seconds: float) -> float:
    """``seconds`` of a machine that has room for the ranks and this client."""
    return seconds if os.getloadavg()[0] <= 2 * (os.cpu_count() or 1) else max(30, 4 * seconds)


class Server:
    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        named = ["--name", "tiny", "--port", "0"]
        command = [sys.executable, "-m", "tpcore", "serve", str(folder), *named, *options]
        pipes: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: Any = subprocess.Popen(command, env=os.environ | environment, **pipes)
        self.log: list[str] = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self._reader.start()
        told = re.search(r"tiny at (http://127.0.0.1:\d+), tp=2", self.process.stdout.readline())
        assert told is not None, self.log
        self.client = openai.OpenAI(base_url=f"{told[1]}/v1", api_key="-", max_retries=0, timeout=PATIENCE)

    def text(self, prompt: str = "w1 w2 w3", tokens: int = NEW, **options: Any) -> str:
        options = {"temperature": 0} | options
        answer = self.client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, **options)
        return str(answer.choices[0].text)

    def streamed(self, prompt: str = "w1 w2 w3", tokens: int = NEW) -> Iterator[str]:
        options: Any = {"temperature": 0, "stream": True, "max_tokens": tokens}
        for part in self.client.completions.create(model="tiny", prompt=prompt, **options):
            yield part.choices[0].text

    def counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        health = self.client._client.get(str(self.client.base_url).replace("/v1/", "/health")).json()
        assert health["status"] == "ok"
        return health["running"], health["waiting"]

    def until(self, running: int) -> None:
        """Wait until so many requests run, and none waits."""
        deadline = time.monotonic() + 120  # against hangs alone
        while self.counts() != (running, 0):
            assert time.monotonic() < deadline, self.counts()
            time.sleep(0.02)

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            except OSError:
                continue
            if int(status[1]) == self.process.pid and f"RANK={number}" in environment:
                return int(pid)
        raise AssertionError(self.log)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return int(self.process.wait(60))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()
        self.client.close()


def expected(folder: Path, prompt: str, tokens: int = NEW) -> str:
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(answer[0], skip_special_tokens=True)[len(tokenizer.decode(ids[0])) :])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = transformers.LlamaConfig(**sizes, vocab_size=WORDS + 4, num_hidden_layers=2, max_position_embeddings=512)
    config.eos_token_id = None
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    options = folder / "generation_config.json"
    options.write_text(json.dumps({**json.loads(options.read_text()), "min_p": 0.25}))
    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{i}" for i in range(WORDS))]
    text = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text, unk_token="<unk>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[Server]:
    """A server that ends well."""
    served = Server(folder, *options, **environment)
    try:
        yield served
        assert served.end() == 0, "".join(served.log)
        assert not [line for line in served.log if "Traceback" in line or "a request failed" in line], served.log
    finally:
        served.close()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # as users run it: what a checked run notes of each input is compared in training alone, and is 35 MiB of a rank
    with serving(folder, "--max-requests", "24", TPCORE_CHECK="warmup") as served:  # 20 leave at once
        yield served


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, str]:
    """What ``generate`` makes of each prompt, with as many tokens as the prompt has."""
    prompts = [" ".join(f"w{(i * j) % WORDS}" for j in range(1, 3 + 2 * i)) for i in range(1, 9)]
    return {prompt: expected(folder, prompt, len(prompt.split())) for prompt in prompts}


class TestServer:
    """In order, on one server."""

    pytestmark = SERVED

    def test_the_first_request_and_many_at_once_are_those_of_generate(self, folder: Path, server: Server) -> None:
        prompts = [" ".join(f"w{(i * j) % WORDS}" for j in range(1, 3 + i)) for i in range(1, 7)]
        want = [expected(folder, prompt) for prompt in prompts]
        assert server.text(prompts[0]) == want[0]
        with ThreadPoolExecutor(len(prompts)) as threads:
            assert [*threads.map(server.text, prompts)] == want
        assert "".join(server.streamed(prompts[2])) == want[2]

    def test_prompts_of_a_list_are_choices_in_their_order(self, folder: Path, server: Server) -> None:
        texts = ["w1 w2 w3", "w4 w5", "w1 w2 w3 w4 w5 w6"]
        ids = [transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in texts]
        want = [expected(folder, text) for text in texts]
        for prompts, those in ((texts, want), (ids, want), (ids[0], want[:1]), (texts[1:2], want[1:2])):
            options: Any = {"prompt": prompts, "max_tokens": NEW, "temperature": 0}
            answer = server.client.completions.create(model="tiny", **options)
            assert [(choice.index, choice.text) for choice in answer.choices] == [*enumerate(those)]
            usage: Any = answer.usage
            assert usage.completion_tokens == NEW * len(those)

    def test_log_probabilities_are_those_of_the_whole_model(self, folder: Path, server: Server) -> None:
        """In float32, whose sums two ranks round otherwise; exactness is shown beside, in float64."""
        options: Any = {"prompt": [7, 5, 9, 64, 4], "max_tokens": NEW, "temperature": 0, "logprobs": 5, "echo": True}
        told: Any = server.client.completions.create(model="tiny", **options).choices[0].logprobs
        ids = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids([t.strip() for t in told.tokens])
        model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for i in range(1, len(ids)):
            best = scores[i - 1].topk(5).values.tolist()
            assert [*told.top_logprobs[i].values()][:5] == pytest.approx(best, abs=1e-5)
            assert told.token_logprobs[i] == pytest.approx(float(scores[i - 1, ids[i]]), abs=1e-5)

    def test_chat_models_and_stops(self, server: Server) -> None:
        assert [model.id for model in server.client.models.list()] == ["tiny"]
        whole = server.text()
        messages: Any = [{"role": "user", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
        options: Any = {"model": "tiny", "messages": messages, "max_tokens": NEW, "temperature": 0}
        answer = server.client.chat.completions.create(**options)
        # a message of its own, and no continuation
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (whole[1:], "length")
        parts = server.client.chat.completions.create(**options, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole[1:]
        words = whole.split(" ")
        stop = f"{words[4]} {words[5]}"
        assert server.text(stop=["nothing", stop]) == whole[: whole.index(stop)]

    def test_options_that_no_request_gets_are_named(self, server: Server) -> None:
        assert any("min_p=0.25 of the generation config: not applied" in line for line in server.log)

    def test_an_idle_connection_outlives_those_that_clients_keep(self, server: Server) -> None:
        url = server.client.base_url
        with closing(http.client.HTTPConnection(url.host, url.port, timeout=60)) as connection:
            for wait in (6, 0):  # seconds: httpx has closed its own after 5
                connection.request("GET", "/health")
                assert json.load(connection.getresponse())["status"] == "ok"
                time.sleep(wait)

    def test_samples_depend_on_their_seed_alone(self, server: Server) -> None:
        one = server.text(temperature=1.3, seed=5, top_p=0.9)
        assert server.text(temperature=1.3, seed=5, top_p=0.9) == one
        assert len({server.text(temperature=1.3, seed=0) for _ in range(3)}) == 1  # which is a seed too
        assert len({server.text(temperature=1.3, seed=seed) for seed in range(5)}) > 1
        # so small that a division by it would leave no numbers
        assert server.text(temperature=1e-45) == server.text()
        assert len({server.text(temperature=1.3) for _ in range(5)}) > 1
        assert {server.text(temperature=1.9, extra_body={"top_k": 1}) for _ in range(3)} == {server.text()}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prompt": "w1 " * 600}, "the prompt has 600 tokens, and prompt and answer may have 512 together"),
            ({"prompt": ["w1", "w1 " * 600]}, "the prompt has 600 tokens, and prompt and answer may have 512 together"),
            ({"prompt": ["w1"] * 25}, "25 prompts are more than the 24 requests that may be open"),
            ({"prompt": ["w1", "w2"], "stream": True}, "2 prompts have no stream"),
            ({"prompt": [1, 10**9]}, "the prompt has token 1000000000, and there are"),
            ({"prompt": ["w1", []]}, "is not a string of one or more characters, token ids, or a list"),
            ({"model": "other"}, "'tiny'; requested 'other'"),
            ({"extra_body": {"n": None, "max_tokens": 0}}, "max_tokens=0 is not a whole"),  # null is what is not said
        ],
    )
    def test_a_wrong_request_is_one_sentence(self, server: Server, options: dict[str, Any], message: str) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            server.client.completions.create(**{"model": "tiny", "prompt": "w1", **options})
        assert caught.value.status_code == 400
        body: Any = caught.value.body
        assert message in body["message"]
        assert "\n" not in body["message"]

    def kill_again(self, server: Server) -> None:
        """The second rank, while it starts."""
        while True:
            with suppress(AssertionError):  # until it is there
                return os.kill(server.rank(1), signal.SIGKILL)

    @pytest.mark.parametrize("rank", [1, 0])
    def test_a_lost_rank_fails_what_is_open_and_the_ranks_start_again(self, server: Server, rank: int) -> None:
        want = server.text()
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(server.text, tokens=LONG) for _ in range(2)]
            parts = server.streamed(tokens=LONG)
            next(parts)
            server.until(running=3)  # one that has not been taken yet would be the new ranks'
            os.kill(server.rank(rank), signal.SIGKILL)
            killed = time.monotonic()
        # of an open stream the first rank's end is seen by the transport
        with pytest.raises(Exception, match=r"a rank failed, and the ranks start again|peer closed|[Cc]onnection"):
            list(parts)
        assert time.monotonic() - killed < limit(5)  # what is promised: no wait for a time-out, of a minute
        errors = [each.exception() for each in asked]
        assert all(isinstance(error, openai.APIError) for error in errors), errors
        if rank == 1:
            assert all("a rank failed, and the ranks start again" in str(e) for e in errors), errors
            self.kill_again(server)
        again = None
        while again is None:
            with suppress(openai.InternalServerError, openai.APIConnectionError):  # until the first rank ends
                again = server.text()  # waits for the new ranks
            assert again or time.monotonic() - killed < 30, "".join(server.log)
        assert again == want
        # another rank may have seen the loss and ended in the same moment, and stands beside it
        told = rf"rank {rank} was killed by SIGKILL\b.*; after \d+ s, the ranks start again"
        assert sum(re.search(told, line) is not None for line in server.log) == 1 + rank, server.log


NAN = float("nan")
WRONG: dict[str, list[Any]] = {
    "model": ["other", 5, ["tiny"], {"a": 1}, True],
    "max_tokens": [0, -1, 1.5, "4", True, [], {}, 10**30, NAN],
    "max_completion_tokens": [0, "x", [4]],
    "temperature": [-1, 3, "hot", [], {}, True, NAN, float("inf")],
    "top_p": [0, -0.1, 1.1, "x", [], True, NAN],
    "seed": [-1, 2**63, 0.5, "x", [], True],
    "stop": ["", 5, [1], [""], list("abcde"), {"a": 1}, True, [None]],
    "stream": ["yes", 1, {"a": 1}, [True]],
    "n": [2, 0, "1", [1], {}],
    "logprobs": [6, -1, 0.5, "x", [1]],
    "echo": [1, "x"],
    "top_logprobs": [-1, 21, True, 2],
    "suffix": ["x", 0, []],
    "logit_bias": [{"1": 2}, [1], 3],
    "response_format": [{"type": "json_object"}, "text"],
    "chat_template_kwargs": [1, "x", [1], {"tokenize": 1}, {"chat_template": "{{ 1 / 0 }}"}],
    "odd": [1, "x", {}],
    "generation_config": ["{}", {}],
}
PROMPTS: list[Any] = ["", 5, [], ["w1", ""], [[]], [-1], [True], {"a": 1}, "w1 " * 600, True]
MESSAGES: list[Any] = [
    *([], {}, "x", 5, [5], [{}], [[]], [{"role": "king", "content": "x"}], [{"role": ["user"], "content": "x"}]),
    *([{"role": "user", "content": what}] for what in (5, {}, [5], [{"type": "image_url"}], [{"type": "text"}])),
    *([{"role": "assistant", "content": "x", "tool_calls": what}] for what in (5, [5], [{}], [{"function": 5}])),
    [{"role": "tool"}],
]
BROKEN: list[Callable[[bytes, random.Random], bytes]] = [
    lambda body, numbers: body[: numbers.randrange(len(body))],
    lambda body, numbers: numbers.randbytes(numbers.randrange(1, 200)),
    lambda body, numbers: body.replace(b"w1", b"\xff\xfe"),
    lambda body, numbers: body.replace(b"w1", b"\\ud800"),
    lambda body, numbers: b"[" * numbers.choice([1, 100_000]),
    lambda body, numbers: numbers.choice([b"", b"5", b"null", b'"x"', b"[1]", b"\xef\xbb\xbf{}", b"9" * 5000]),
    lambda body, numbers: body + body,
]


def wrong_request(numbers: random.Random) -> tuple[str, str, bytes]:
    """Method, path and body of a request with one to three faults."""
    chat = numbers.random() < 0.5
    content, path = ("messages", "chat/completions") if chat else ("prompt", "completions")
    text = [{"role": "user", "content": "w1"}] if chat else "w1"
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "temperature": 0, content: text}
    where = numbers.random()
    if where < 0.05:
        return numbers.choice(["GET", "PUT", "DELETE", "PATCH"]), path, b""
    if where < 0.1:
        return "POST", numbers.choice(["nothing", "completions/x", "..%2f", "models"]), json.dumps(body).encode()
    if where < 0.3:
        return "POST", path, numbers.choice(BROKEN)(json.dumps(body).encode(), numbers)
    wrong = WRONG | {content: [None, *(MESSAGES if chat else PROMPTS)]} | ({"tools": [5, ["x"], {}]} if chat else {})
    for name in numbers.sample(sorted(wrong), numbers.randint(1, 3)):
        body[name] = numbers.choice(wrong[name])
    return "POST", path, json.dumps(body).encode()


def asked(server: Server, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    url = server.client.base_url
    with closing(http.client.HTTPConnection(url.host, url.port, timeout=PATIENCE)) as connection:
        connection.request(method, f"/v1/{path}", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


# -- clients that leave -----------------------------------------------------------------------------------------
def leave(server: Server, numbers: random.Random) -> None:
    """Ask, and be gone: before the request is whole, after it, or in the midst of the answer."""
    url = server.client.base_url
    streams = numbers.random() < 0.5
    body = json.dumps({"model": "tiny", "prompt": "w1 w2", "max_tokens": LONG, "stream": streams}).encode()
    kinds = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\n{kinds}\r\n\r\n".encode()
    whole, when = head + body, numbers.choice(["part", "sent", "answered"])
    with socket.create_connection((url.host, url.port), PATIENCE) as connection:
        connection.sendall(whole[: numbers.randrange(len(whole))] if when == "part" else whole)
        if when == "answered" and streams:
            assert connection.recv(1) == b"H"
        if numbers.random() < 0.5:  # the connection is reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def told(text: str) -> None:
    """Seen with ``-s``."""
    sys.stdout.write(f"\n{text}\n")


def starts(server: Server) -> int:
    return sum("the ranks start again" in line for line in server.log if line.startswith("tpcore serve:"))


def files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> float:
    """MiB."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1024


# -- many requests, and ranks that are killed -------------------------------------------------------------------
class Clients:
    """Threads that ask until the end of the block; each answer is compared with that of ``generate``."""

    def __init__(self, server: Server, answers: dict[str, str], tokens: int | None = None) -> None:
        self._server, self._answers, self._tokens = server, list(answers.items()), tokens
        self._over, self._change = threading.Event(), threading.Condition()
        self.right, self.failed, self.wrong = 0, 0, []  # type: tuple[int, int, list[str]]
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        numbers = random.Random(number)
        while not self._over.is_set():
            prompt, want = numbers.choice(self._answers)
            tokens = self._tokens or len(prompt.split())
            want, parts, whole = " ".join(want.split()[:tokens]), [], True
            try:
                if numbers.random() < 0.5:
                    for part in self._server.streamed(prompt, tokens):
                        parts.append(part)
                else:
                    parts.append(self._server.text(prompt, tokens))
            except openai.APITimeoutError as e:
                self.wrong.append(f"{prompt!r}: {e}")
            except Exception:  # noqa: BLE001  a cut stream is an error of the HTTP client that openai has
                whole = False
                self._over.wait(0.1)
            text = "".join(parts)
            with self._change:
                if (text != want) if whole else not want.startswith(text):
                    self.wrong.append(f"{prompt!r}: {text!r} instead of {want!r}")
                self.right, self.failed = self.right + whole, self.failed + (not whole)
                self._change.notify_all()

    def wait_for(self, more: int) -> None:
        """Until so many more answers are right; each in its time, for many take long on a busy machine."""
        with self._change:
            for goal in range(self.right + 1, self.right + more + 1):
                assert self._change.wait_for(lambda goal=goal: self.right >= goal or self.wrong, PATIENCE), self.right
        assert not self.wrong


class TestFaults:
    """After those above, on the same server."""

    pytestmark = SERVED

    @pytest.mark.parametrize("times", tiers([50], drill=[1000]))
    def test_malformed_requests_are_told_in_one_sentence(
        self, server: Server, answers: dict[str, str], times: int
    ) -> None:
        for seed in range(times):
            method, path, body = wrong_request(random.Random(seed))
            status, answer = asked(server, method, path, body)
            said = f"seed {seed}: {method} {path} {body[:300]!r}: {status} {answer[:300]!r}"
            assert 400 <= status < 500, said
            message = json.loads(answer)["error"]["message"]
            assert 0 < len(message) <= 504, said
            assert not re.search(r"\n|Traceback|torch|aten::| object at 0x", message), said
        prompt, want = next(iter(answers.items()))
        assert server.text(prompt, len(prompt.split())) == want
        server.until(running=0)

    @pytest.mark.parametrize("times", tiers([20], drill=[200]))
    def test_clients_that_leave_leave_nothing(self, server: Server, answers: dict[str, str], times: int) -> None:
        server.text()
        server.until(running=0)
        ranks = [server.rank(0), server.rank(1)]
        before = [files(pid) for pid in ranks]
        for seed in range(times):
            leave(server, random.Random(seed))
        server.until(running=0)
        prompt, want = list(answers.items())[2]
        assert server.text(prompt, len(prompt.split())) == want
        deadline = time.monotonic() + PATIENCE
        while any(files(pid) > most + 1 for pid, most in zip(ranks, before, strict=True)):  # one of this client
            assert time.monotonic() < deadline, (before, [files(pid) for pid in ranks])
            time.sleep(0.05)

    @pytest.mark.parametrize("times", tiers([], drill=[10_000]))
    def test_many_requests_leave_no_memory_behind(self, server: Server, answers: dict[str, str], times: int) -> None:
        ranks = [server.rank(0), server.rank(1)]
        with Clients(server, answers, 2) as clients:
            clients.wait_for(max(100, times // 5))  # caches of the allocator and of Python fill
            before = [(files(pid), resident(pid)) for pid in ranks]
            for _ in range(10):
                clients.wait_for(times // 10)
        server.until(running=0)
        after = [(files(pid), resident(pid)) for pid in ranks]
        assert clients.failed == 0
        assert [few for few, _ in after] <= [most + CLIENTS for most, _ in before], (before, after)
        assert all(new - old < GROWTH for (_, old), (_, new) in zip(before, after, strict=True)), (before, after)
        told(f"{clients.right} requests: open files and MiB of the ranks {before}, then {after}")

    @pytest.mark.parametrize("kills", tiers([], drill=[30]))
    def test_tokens_are_those_of_generate_through_kills(
        self, server: Server, answers: dict[str, str], kills: int
    ) -> None:
        numbers, before = random.Random(0), starts(server)
        with Clients(server, answers) as clients:
            for _ in range(kills):
                clients.wait_for(2 * CLIENTS)
                os.kill(server.rank(numbers.randrange(2)), signal.SIGKILL)
            clients.wait_for(2 * CLIENTS)
        assert starts(server) - before == kills
        told(f"{kills} kills: {clients.right} answers, all right; {clients.failed} requests failed")


@pytest.mark.processes
@pytest.mark.slow
def test_each_collective_may_be_compared(folder: Path, answers: dict[str, str]) -> None:
    with serving(folder, TPCORE_CHECK="1") as server, ThreadPoolExecutor(len(answers)) as threads:
        asked = {prompt: threads.submit(server.text, prompt, len(prompt.split())) for prompt in answers}
        assert {prompt: each.result() for prompt, each in asked.items()} == answers


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def test_what_cannot_be_served_is_said_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    assert "has no config.json: it is no model in transformers' files" in run(tmp_path)
    for name, said in (
        ("*token*", "no tokenizer opens: tokenizer.save_pretrained"),
        ("*.safetensors", "has no weights"),
    ):
        assert said in run(shutil.copytree(folder, tmp_path / name[1:], ignore=shutil.ignore_patterns(name)))
    assert "tp=5 does not fit LlamaForCausalLM" in run(folder, "--tp", 5)
    assert "--tp=4096: this machine can hold" in run(folder, "--tp", 4096, "--backend", "cpu_gloo")
    assert "no backend 'gpu' is installed; there are" in run(folder, "--backend", "gpu")
    assert "--dtype int9: there are auto, float32, bfloat16 and float16" in run(folder, "--dtype", "int9")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen at 127.0.0.1" in run(folder, "--port", taken.getsockname()[1])


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_that_cannot_start_end_it(folder: Path, tmp_path: Path) -> None:
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    command = [sys.executable, "-m", "tpcore", "serve", str(wrong), "--tp", "2", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=forked.PATIENCE, check=False)
    assert ended.returncode == 1
    assert f"{wrong} does not open" in ended.stderr  # of the rank that is first
    assert "exited with status 1 before it could serve" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Connection closed" not in ended.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_a_signal_before_it_serves_ends_it_at_once(folder: Path) -> None:
    command = [sys.executable, "-m", "tpcore", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == f"tpcore serve: starting 2 ranks of {folder.name}\n"
    assert "backend" in process.stderr.readline()  # a rank has begun to load the model
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert process.wait(120) == 0
    assert time.monotonic() - sent < limit(14)  # the patience for open requests is 15 s, and there are none
    process.stderr.close()
