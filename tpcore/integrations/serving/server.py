"""The web application of the first rank: OpenAI's routes over transformers' handlers."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as RouteError
from starlette.requests import ClientDisconnect
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import CBWorkerDeadError, Modality

from ...log import log
from .batches import Batches
from .requests import malformed

_BYTES = 2**23  # of a body
_WAIT = 30  # seconds for a body to come
_LONGEST = 500  # characters of an error
_CLOSED = 499  # nginx's status for a client that left
_POLL = 0.25  # seconds between looks whether a client is there


class _One:
    """What transformers' handlers ask their models and generation state for: the one model here."""

    def __init__(self, name: str, model: Any, tokenizer: Any, batches: Batches) -> None:
        self.force_model, self._model, self._tokenizer, self._batches = name, model, tokenizer, batches
        self._compile = False

    def process_model_name(self, name: str) -> str:
        return name

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._model, self._tokenizer

    def get_model_modality(self, *_: Any, **__: Any) -> Modality:
        return Modality.LLM

    def use_continuous_batching(self, *_: Any) -> bool:
        return True

    def get_manager(self, *_: Any, **__: Any) -> Batches:
        return self._batches


class _Sampled:
    """A temperature above 0 samples, whatever the model's default is. ``top_k`` is no option of OpenAI's."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request({n: v for n, v in body.items() if n != "top_k"})  # type: ignore[misc]

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **options: Any) -> Any:
        config = super()._build_generation_config(body, *args, **options)  # type: ignore[misc]
        if body.get("temperature"):
            config.do_sample = True
        config.top_k, config.seed = body.get("top_k", config.top_k), body.get("seed")
        return config


class _Chat(_Sampled, ChatCompletionHandler):
    pass


class _Completions(_Sampled, CompletionHandler):
    pass


def application(name: str, model: Any, tokenizer: Any, batches: Batches) -> FastAPI:
    """``name``: the model's in requests."""
    app = FastAPI(openapi_url=None)
    one: Any = _One(name, model, tokenizer, batches)
    chat, completions = _Chat(one, one), _Completions(one, one)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(chat, "messages", request)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        return await _answer(completions, "prompt", request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "tpcore"}]})

    @app.get("/health")
    async def health() -> Response:
        if not batches.is_alive():
            return _error(503, "the engine has stopped")
        running, waiting = batches.counts()
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    @app.exception_handler(RouteError)
    async def no_route(request: Request, error: RouteError) -> Response:
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

    return app


async def _answer(handler: Any, content: str, request: Request) -> Response:
    try:
        body = _plain(await _json(request))
        wrong = malformed(body, content)
        if wrong is not None:
            return _error(400, wrong)
        return await _while_there(request, handler.handle_request(body, uuid.uuid4().hex))
    except ClientDisconnect:
        return Response(status_code=_CLOSED)
    except HTTPException as e:
        return _error(e.status_code, str(e.detail))
    except CBWorkerDeadError as e:
        return _error(503, str(e))
    except (ValueError, TypeError, KeyError, TemplateError) as e:  # of the tokenizer and its template
        return _error(400, f"the tokenizer and its chat template do not take this: {_line(e)}")
    except Exception as e:  # noqa: BLE001  whatever it is, this client has an answer, and the others go on
        log.exception("a request failed")
        return _error(500, _line(e))


def _plain(body: Any) -> Any:
    """``body`` and its messages without what is null, which OpenAI's clients send for what is not said."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
        if isinstance(body.get("messages"), list):
            body["messages"] = [*map(_plain, body["messages"])]
    return body


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


async def _read(request: Request) -> bytes:
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > _BYTES:
            raise HTTPException(413, f"the body has more than {_BYTES} bytes")
    return bytes(found)


async def _json(request: Request) -> Any:
    try:
        found = await asyncio.wait_for(_read(request), _WAIT)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body did not come within {_WAIT} s") from None
    try:
        body = json.loads(found)
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is in no text that a tokenizer takes
    except (ValueError, RecursionError) as e:
        raise HTTPException(400, f"the body is not JSON: {_line(e)}") from None
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
            if event.startswith('data: {"error": "'):
                yield f"data: {json.dumps(_body(503, json.loads(event[6:])['error']))}\n\n"
                return
            yield event
        yield "data: [DONE]\n\n"
    finally:
        await events.aclose()


def _error(status: int, message: str) -> Response:
    """One line, however long what the client sent is."""
    line = " ".join(message.split())
    return JSONResponse(_body(status, line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."), status)


def _body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
