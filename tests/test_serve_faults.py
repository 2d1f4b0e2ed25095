"""``tpcore serve`` through malformed requests and clients that leave; in drills killed ranks and many requests."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import LONG, WORDS, Server, expected, written
from tiers import tiers

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("serve")]
CLIENTS = 4
PATIENCE = 240  # seconds for new ranks, on a machine that does much else
GROWTH = 6  # MiB of a rank in 10,000 requests: outputs that were kept on the second rank were 11, and 1 on the first


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, str]:
    """What ``generate`` makes of each prompt, with as many tokens as the prompt has."""
    prompts = [" ".join(f"w{(i * j) % WORDS}" for j in range(1, 3 + 2 * i)) for i in range(1, 9)]
    return {prompt: expected(folder, prompt, len(prompt.split())) for prompt in prompts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # as users run it: what a checked run notes of each input is compared in training alone, and is 35 MiB of a rank
    served = Server(folder, TPCORE_CHECK="warmup")
    served.client = served.client.with_options(timeout=PATIENCE)
    try:
        yield served
        assert served.end() == 0, served.log
        assert not [line for line in served.log if "Traceback" in line or "a request failed" in line], served.log
    finally:
        served.close()


# -- malformed requests ---------------------------------------------------------------------------------------
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
    "logprobs": [5, True, "x"],
    "suffix": ["x", 0, []],
    "logit_bias": [{"1": 2}, [1], 3],
    "response_format": [{"type": "json_object"}, "text"],
    "chat_template_kwargs": [1, "x", [1], {"tokenize": 1}, {"chat_template": "{{ 1 / 0 }}"}],
    "odd": [1, "x", {}],
    "generation_config": ["{}", {}],
}
PROMPTS: list[Any] = ["", 5, [], ["w1"], {"a": 1}, "w1 " * 600, True]
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
        connection.request(method, f"/v1/{path}", body)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("times", tiers([50], drill=[1000]))
def test_malformed_requests_are_told_in_one_sentence(server: Server, answers: dict[str, str], times: int) -> None:
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


# -- clients that leave -----------------------------------------------------------------------------------------
def leave(server: Server, numbers: random.Random) -> None:
    """Ask, and be gone: before the request is whole, after it, or in the midst of the answer."""
    url = server.client.base_url
    streams = numbers.random() < 0.5
    body = json.dumps({"model": "tiny", "prompt": "w1 w2", "max_tokens": LONG, "stream": streams}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    whole, when = head + body, numbers.choice(["part", "sent", "answered"])
    with socket.create_connection((url.host, url.port), PATIENCE) as connection:
        connection.sendall(whole[: numbers.randrange(len(whole))] if when == "part" else whole)
        if when == "answered" and streams:
            assert connection.recv(1) == b"H"
        if numbers.random() < 0.5:  # the connection is reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("times", tiers([20], drill=[200]))
def test_clients_that_leave_leave_nothing(server: Server, answers: dict[str, str], times: int) -> None:
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


def told(text: str) -> None:
    """Seen with ``-s``."""
    sys.stdout.write(f"\n{text}\n")


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


@pytest.mark.parametrize("times", tiers([], drill=[10_000]))
def test_many_requests_leave_no_memory_behind(server: Server, answers: dict[str, str], times: int) -> None:
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
def test_tokens_are_those_of_generate_through_kills(server: Server, answers: dict[str, str], kills: int) -> None:
    numbers = random.Random(0)
    with Clients(server, answers) as clients:
        for _ in range(kills):
            clients.wait_for(2 * CLIENTS)
            os.kill(server.rank(numbers.randrange(2)), signal.SIGKILL)
        clients.wait_for(2 * CLIENTS)
    assert sum("the ranks start again" in line for line in server.log if line.startswith("tpcore serve:")) == kills
    told(f"{kills} kills: {clients.right} answers, all right; {clients.failed} requests failed")
