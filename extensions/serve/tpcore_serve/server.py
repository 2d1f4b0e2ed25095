"""The web application of the first rank: OpenAI's routes over transformers' handlers."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as RouteError
from starlette.requests import ClientDisconnect

from tpcore.log import log

from .batches import Batches, first_line
from .handlers import Chat, Completions
from .requests import LOCAL, Door, malformed

_BYTES = 2**23  # of a body
_WAIT = 30  # seconds for a body to come
_LONGEST = 500  # characters of an error
_WORD = 16  # characters of a token or more: unknown words and spaces are few tokens
_CLOSED = 499  # nginx's status for a client that left
_POLL = 0.25  # seconds between looks whether a client is there


def application(
    name: str, model: Any, tokenizer: Any, batches: Batches, hosts: tuple[str, ...] = LOCAL, key: str = ""
) -> FastAPI:
    """``name``: the model's in requests. ``hosts``: the server's. ``key``: of its clients; empty: they need none."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(Door, hosts=hosts, refused=failure, key=key)
    served = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "tpcore"}
    state = _handler_state(name, model, tokenizer, batches)
    chat, completions = Chat(state, state), Completions(state, state)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(chat, "messages", request)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        return await _answer(completions, "prompt", request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [served]})

    @app.get("/v1/models/{wanted:path}")
    async def one_model(wanted: str) -> Response:
        return JSONResponse(served) if wanted == name else failure(404, f"there is no model {wanted!r}, only {name!r}")

    @app.get("/health")
    async def health() -> Response:
        if not batches.is_alive():
            return failure(503, "the engine has stopped")
        running, waiting = batches.counts()
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(_metrics(batches), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(RouteError)
    async def no_route(request: Request, error: RouteError) -> Response:
        return failure(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

    return app


def _metrics(batches: Batches) -> str:
    """In the text form of Prometheus."""
    running, waiting = batches.counts()
    gauges = {"requests_running": running, "requests_waiting": waiting, "up": int(batches.is_alive())}
    lines = [(name, "gauge", value) for name, value in gauges.items()]
    lines += [(f"{name}_total", "counter", value) for name, value in batches.totals.items()]
    return "".join(f"# TYPE tpcore_{name} {kind}\ntpcore_{name} {value}\n" for name, kind, value in lines)


def _handler_state(name: str, model: Any, tokenizer: Any, batches: Batches) -> Any:
    """What transformers' handlers ask their models and generation state for."""
    return SimpleNamespace(
        force_model=name,
        _compile=False,
        process_model_name=lambda name: name,
        load_model_and_processor=lambda *_, **__: (model, tokenizer),
        manager=batches,
        most_characters=batches.limit * max(_WORD, *map(len, tokenizer.get_vocab())),
    )


async def _answer(handler: Any, content: str, request: Request) -> Response:
    try:
        body = _plain(await _json(request))
        wrong = malformed(body, content)
        if wrong is not None:
            return failure(400, wrong)
        return await _while_there(request, handler.handle_request(body, uuid.uuid4().hex))
    except ClientDisconnect:
        return Response(status_code=_CLOSED)
    except HTTPException as e:
        return failure(e.status_code, str(e.detail))
    except (ValueError, TypeError, KeyError, TemplateError) as e:  # of the tokenizer and its template
        return failure(400, f"the tokenizer and its chat template do not take this: {first_line(e)}")
    except Exception as e:  # noqa: BLE001  whatever it is, this client has an answer, and the others go on
        log.exception("a request failed")
        return failure(500, first_line(e))


def _plain(body: Any) -> Any:
    """``body`` and its messages without what is null or no calls, which clients send for what is not said."""
    if isinstance(body, dict):
        # transformers' templates lose the text beside a list of no calls
        body = {k: v for k, v in body.items() if v is not None and not (k == "tool_calls" and v == [])}
        if isinstance(body.get("messages"), list):
            body["messages"] = [*map(_plain, body["messages"])]
    return body


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BYTES:
            raise HTTPException(413, f"the body has more than {_BYTES} bytes")
    return bytes(body)


async def _json(request: Request) -> Any:
    try:
        raw = await asyncio.wait_for(_read(request), _WAIT)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body did not come within {_WAIT} s") from None
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is in no text that a tokenizer takes
    except (ValueError, RecursionError) as e:
        raise HTTPException(400, f"the body is not JSON: {first_line(e)}") from None
    return body


async def _while_there(request: Request, work: Any) -> Response:
    """The answer; nobody's, if the client leaves before it is there."""
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait({task}, timeout=_POLL))[0]:
        if await request.is_disconnected():
            task.cancel()
            return Response(status_code=_CLOSED)
    answer: Response = task.result()
    if isinstance(answer, StreamingResponse):
        answer.body_iterator = _done(answer.body_iterator)
    return answer


async def _done(events: Any) -> AsyncIterator[Any]:
    """``events``, and the one by which OpenAI's clients know the end."""
    try:
        async for event in events:
            before, error, why = event.partition('data: {"error": "')
            if before:
                yield before
            if error:
                status, _, why = json.loads(error[6:] + why)["error"].partition(" ")
                yield f"data: {json.dumps(_body(int(status), why))}\n\n"
                return
        yield "data: [DONE]\n\n"
    finally:
        await events.aclose()


def failure(status: int, message: str) -> Response:
    """One line, however long what the client sent is."""
    line = " ".join(message.split())
    return JSONResponse(_body(status, line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."), status)


def _body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
