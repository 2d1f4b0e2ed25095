"""``tpcore serve``: OpenAI's client against two ranks. Tokens are those of ``generate``, whatever happens to others."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import LONG, NEW, WORDS, Server, beside, expected, written
from typer.testing import CliRunner

from tpcore.cli.app import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    served = Server(folder, "--max-requests", "8")
    try:
        yield served
        assert served.end() == 0, served.log
    finally:
        served.close()


class TestServer:
    """In order, on one server."""

    pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("serve")]

    def test_the_first_request_and_many_at_once_are_those_of_generate(self, folder: Path, server: Server) -> None:
        prompts = [" ".join(f"w{(i * j) % WORDS}" for j in range(1, 3 + i)) for i in range(1, 7)]
        want = [expected(folder, prompt) for prompt in prompts]
        assert server.text(prompts[0]) == want[0]
        found: dict[int, str] = {}
        with beside(len(prompts), lambda i: found.update({i: server.text(prompts[i])})):
            pass
        assert [found[i] for i in range(len(prompts))] == want
        assert "".join(server.streamed(prompts[2])) == want[2]

    def test_chat_models_and_stops(self, server: Server) -> None:
        assert [model.id for model in server.client.models.list()] == ["tiny"]
        whole = server.text()
        messages: Any = [{"role": "user", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
        options: Any = {"model": "tiny", "messages": messages, "max_tokens": NEW, "temperature": 0}
        answer = server.client.chat.completions.create(**options)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (whole, "length")
        parts = server.client.chat.completions.create(**options, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
        words = whole.split(" ")
        stop = f"{words[3]} {words[4]}"
        assert server.text(stop=["nothing", stop]) == whole[: whole.index(stop)]

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

    def test_too_many_are_told_to_come_again(self, server: Server) -> None:
        told: list[str] = []

        def one(_: int) -> None:
            try:
                server.text(tokens=LONG)
            except openai.RateLimitError as e:
                told.append(str(e))

        with beside(24, one):
            pass
        assert told
        assert all("8 requests are open, and no more are taken" in text for text in told)

    def kill_again(self, server: Server) -> None:
        """The second rank, while it starts."""
        while True:
            with suppress(AssertionError):  # until it is there
                return os.kill(server.rank(1), signal.SIGKILL)

    @pytest.mark.parametrize("rank", [1, 0])
    def test_a_lost_rank_fails_what_is_open_and_the_ranks_start_again(self, server: Server, rank: int) -> None:
        want, errors = server.text(), []

        def one(_: int) -> None:
            try:
                server.text(tokens=LONG)
            except openai.APIError as e:
                errors.append(e)

        with beside(2, one):
            parts = server.streamed(tokens=LONG)
            next(parts)
            server.until(running=3)  # one that has not been taken yet would be the new ranks'
            os.kill(server.rank(rank), signal.SIGKILL)
            killed = time.monotonic()
        # of an open stream the first rank's end is seen by the transport
        with pytest.raises(Exception, match=r"a rank failed, and the ranks start again|peer closed|[Cc]onnection"):
            list(parts)
        assert time.monotonic() - killed < 5  # what is promised: no wait for a time-out
        assert len(errors) == 2
        if rank == 1:
            assert all("a rank failed, and the ranks start again" in str(e) for e in errors), errors
            self.kill_again(server)
        again = None
        while again is None:
            with suppress(openai.InternalServerError, openai.APIConnectionError):  # until the first rank ends
                again = server.text()  # waits for the new ranks
            assert again or time.monotonic() - killed < 10
        assert again == want
        assert sum(f"rank {rank} was killed by SIGKILL; after" in line for line in server.log) == 1 + rank


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def test_what_cannot_be_served_is_said_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    assert "has no config.json: it is no model in transformers' files" in run(tmp_path)
    assert "--dtype int9: there are auto, float32, bfloat16 and float16" in run(folder, "--dtype", "int9")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen at 127.0.0.1" in run(folder, "--port", taken.getsockname()[1])


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_that_cannot_start_end_it(folder: Path) -> None:
    command = [sys.executable, "-m", "tpcore", "serve", str(folder), "--tp", "3", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "tp=3 does not fit LlamaForCausalLM" in ended.stderr
    assert "exited with status 1 before it could serve" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_a_signal_before_it_serves_ends_it_at_once(folder: Path) -> None:
    command = [sys.executable, "-m", "tpcore", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "backend" in process.stderr.readline()  # a rank has begun to load the model
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert process.wait(30) == 0
    assert time.monotonic() - sent < 10  # the patience for open requests is 15 s, and there are none
    process.stderr.close()
