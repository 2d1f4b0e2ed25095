"""Whom ``tpcore serve`` lets in: neither pages of others, nor connections that say nothing, nor text without an end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from test_serve_answers import FIELDS, Run, Script, asking, served, streamed, whole

from tpcore_serve import command, rank, requests
from tpcore_serve.handlers import Chat, Completions
from tpcore_serve.requests import LOCAL, Door

JSON = {"content-type": "application/json"}


async def status(hosts: tuple[str, ...], headers: dict[str, str], method: str = "POST") -> int:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    def refused(status: int, message: str) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            assert "--allow-host NAME" in message or "application/json" in message
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body"})

        return answer

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(Door(app, hosts, refused))) as client:
        return int((await client.request(method, "http://localhost/", headers=headers)).status_code)


@pytest.mark.parametrize(
    ("hosts", "headers", "wanted"),
    [
        (LOCAL, JSON, 200),
        (LOCAL, {"content-type": "application/json; charset=utf-8"}, 200),
        (LOCAL, {}, 415),
        (LOCAL, {"content-type": "text/plain"}, 415),
        (LOCAL, {"content-type": "text/plain, application/json"}, 415),
        (LOCAL, {"content-type": "application/x-www-form-urlencoded"}, 415),
        *((LOCAL, JSON | {"host": host}, 200) for host in ("LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000")),
        *(
            (LOCAL, JSON | {"host": host}, 403)
            for host in (
                "evil.org",
                "localhost.evil.org",
                "127.0.0.1.nip.io:80",
                "localhost@evil.org",
                "[::1",
                "10.0.0.1",
            )
        ),
        *((LOCAL, JSON | {"origin": origin}, 200) for origin in ("http://localhost:3000", "http://[::1]")),
        *((LOCAL, JSON | {"origin": origin}, 403) for origin in ("https://evil.org", "null", "file://", "")),
        ((*LOCAL, "0.0.0.0"), JSON | {"host": "10.0.0.1:8000"}, 200),
        ((*LOCAL, "0.0.0.0"), JSON | {"host": "evil.org"}, 403),
        ((*LOCAL, "Gpu.Lab"), JSON | {"host": "gpu.lab", "origin": "https://gpu.lab"}, 200),
        ((*LOCAL, "*"), JSON | {"host": "evil.org", "origin": "null"}, 200),
        ((*LOCAL, "*"), {}, 415),
    ],
)
def test_a_door_admits_its_own(hosts: tuple[str, ...], headers: dict[str, str], wanted: int) -> None:
    assert asyncio.run(status(hosts, headers)) == wanted
    if wanted != 415:
        assert asyncio.run(status(hosts, {k: v for k, v in headers.items() if k != "content-type"}, "GET")) == wanted


def test_a_refusal_is_told_as_other_errors_are() -> None:
    async def ask(client: openai.AsyncOpenAI, _: Script) -> str:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.models.list(extra_headers={"origin": "https://evil.org"})
        return caught.value.message

    message = asking(served(FIELDS))(ask)
    assert "origin 'https://evil.org' is none of this server's: tpcore serve --allow-host NAME admits it" in message


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("Bearer k\u00fc", 200), ("bearer kü", 200), ("Basic kü", 401), ("Bearer -", 401), ("kü", 401), (None, 401)],
)
def test_a_key_is_asked_of_all_but_health(said: str | None, wanted: int) -> None:
    app = served(FIELDS, key="kü")[0]

    async def ask() -> tuple[int, int, int]:
        headers: Any = {} if said is None else {"authorization": said.encode()}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            got = [await client.get(path, headers=headers) for path in ("/v1/models", "/metrics")]
            return got[0].status_code, got[1].status_code, (await client.get("/health")).status_code

    assert asyncio.run(ask()) == (wanted, wanted, 200)


def test_metrics_count_requests_and_tokens() -> None:
    async def ask(client: openai.AsyncOpenAI, _: Script) -> tuple[str, Any]:
        usage = (await client.completions.create(model="org/tiny", prompt="w4 w4", temperature=0)).usage
        return (await client._client.get("http://localhost/metrics")).text, usage

    text, usage = asking(served(FIELDS))(ask)
    values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    assert values == {
        "tpcore_requests_running": values["tpcore_requests_running"],
        "tpcore_requests_waiting": "0",
        "tpcore_up": "1",
        "tpcore_requests_total": "1",
        "tpcore_requests_refused_total": "0",
        "tpcore_prompt_tokens_total": str(usage.prompt_tokens),
        "tpcore_generated_tokens_total": str(usage.completion_tokens),
    }


@pytest.fixture
def listening() -> Iterator[Callable[[Callable[[int, Script], Awaitable[Any]]], Any]]:
    """Runs a function of the port of a server, and its engine."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    ready, write = os.pipe()
    os.set_blocking(ready, False)
    app, engine, batches = served(FIELDS)

    def run(ask: Callable[[int, Script], Awaitable[Any]]) -> Any:
        async def asked(listener: socket.socket) -> Any:
            serving = asyncio.ensure_future(rank._served(app, engine, batches, listener, write))
            try:
                return await asyncio.wait_for(ask(listener.getsockname()[1], engine), 60)  # against hangs
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(serving, 60)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            return asyncio.run(asked(listener))

    run.ready = ready  # type: ignore[attr-defined]
    yield run
    signal.signal(signal.SIGTERM, before)
    os.close(ready)
    os.close(write)


def test_ranks_that_answered_have_served_though_one_is_gone_at_once(
    listening: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server whose ranks were lost twice would end, for ranks that end before they serve are not tried again."""

    async def ask(port: int, _: Script) -> bytes:
        assert await healthy(port)
        return os.read(listening.ready, 1)

    assert listening(ask) == b"1"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(command, "_RANK", "a_rank_that_goes")
    (tmp_path / "a_rank_that_goes.py").write_text("import os, sys\nos.write(int(sys.argv[3]), b'1')\nos._exit(7)")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = command._round({"tp": 1, "name": "tiny"}, {}, listener, [], "here")
    assert found == (True, "rank 0 exited with status 7")


async def healthy(port: int) -> bool:
    async with httpx2.AsyncClient() as client:
        return bool((await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200)


HALF = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = HALF + b"content-type: application/json\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HALF, WHOLE])
def test_a_head_that_does_not_come_ends_its_connection(
    listening: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_HEAD", 0.1)

    async def ask(port: int, engine: Script) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        engine.waits_for = 2
        async with openai.AsyncOpenAI(base_url=f"http://localhost:{port}/v1", api_key="-", max_retries=0) as client:
            long = asyncio.ensure_future(whole(client, "w4"))  # which stays, for its head has come
            if sent == WHOLE:  # and a half one after it
                writer.write(WHOLE)
                await reader.readuntil(b"}")
            writer.write(sent[:-2])
            with suppress(ConnectionResetError):
                assert not await reader.read()
            writer.close()
            other = await streamed(client, "w4")
            return other == await long

    assert listening(ask)


@pytest.mark.parametrize("sent", [b"", HALF, BODY, WHOLE])
def test_connections_that_ask_nothing_make_room(listening: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "connections", lambda: 4)

    async def ask(port: int, _: Script) -> list[bool]:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for _, writer in idle:
            writer.write(sent)
        answers = [await healthy(port) for _ in range(3)]
        for _, writer in idle:
            writer.close()
        return answers

    assert listening(ask) == [True] * 3


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_text_is_measured_before_it_is_tokenized(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def long(client: openai.AsyncOpenAI, _: Script) -> str:
        with pytest.raises(openai.BadRequestError) as chat:
            await ask(client, "w4 " * 10**6)
        with pytest.raises(openai.BadRequestError) as text:
            await client.completions.create(model="org/tiny", prompt="w4 " * 10**6)
        assert chat.value.message == text.value.message
        return text.value.message

    assert "the prompt has 3000000 characters, and its tokens have at most " in asking(served(FIELDS))(long)


@pytest.mark.parametrize("kind", [Chat, Completions])
def test_others_are_answered_while_a_text_is_tokenized(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, tokenized = threading.Event(), threading.Event(), kind._tokenized

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return tokenized(*args)

    monkeypatch.setattr(kind, "_tokenized", slow)

    async def ask(client: openai.AsyncOpenAI, _: Script) -> Any:
        if kind is Chat:
            one = asyncio.ensure_future(whole(client, "w4"))
        else:
            one = asyncio.ensure_future(client.completions.create(model="org/tiny", prompt="w4", temperature=0))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert (await client.models.list()).data
        go.set()
        return await one

    run: Run = asking(served(FIELDS))
    assert run(ask)
