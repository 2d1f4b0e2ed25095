"""Who may make requests: whoever says something, with the key, from no foreign page; and what requests may say."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import resource
from collections.abc import Callable, Mapping
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from transformers import PreTrainedTokenizerBase
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD = 10.0  # seconds for the head of a request to come
_MOST = 4096
LOCAL = ("localhost", "127.0.0.1", "::1")


def connections() -> int:
    """How many may be open: half of the files, for those that are not counted yet and the ranks have some too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2)


class Connection(H11Protocol):
    """Ends if a head does not come in time, or if there are too many and it has no whole request."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._watch()
        if len(self.connections) > connections():
            silent = [c for c in self.connections if isinstance(c, Connection) and not c.is_asked(whole=True)]
            min(silent, key=lambda c: c._since).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def is_asked(self, whole: bool = False) -> bool:
        """Whether a request is here, and not answered yet. ``whole``: with its body."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete and not (whole and cycle.more_body)

    def _watch(self) -> None:
        if self._late is None and not self.is_asked():
            self._late = self.loop.call_later(_HEAD, self.transport.abort)
        elif self._late is not None and self.is_asked():
            self._late.cancel()
            self._late = None


class Door:
    """Refuses what a page in a browser makes others send: its name for this host, its origin, its kinds of content."""

    def __init__(self, app: Any, hosts: tuple[str, ...], refused: Callable[[int, str], Any], key: str = "") -> None:
        """``hosts``: names of this server; "*" admits all, "0.0.0.0" and "::" every address. ``key``: which requests
        have to say, but for /health, if it is not empty."""
        self._key = key.encode()
        self._app, self._hosts, self._refused = app, {host.lower() for host in hosts}, refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        wrong = self._wrong(scope["method"], scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if wrong is None else self._refused(*wrong))(scope, receive, send)

    def _wrong(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        for name, url in {"host": f"//{headers.get('host', '')}", "origin": headers.get("origin")}.items():
            if url is not None and not self._admits(url):
                value = headers.get(name, "")
                return 403, f"{name} {value!r} is none of this server's: tpcore serve --allow-host NAME admits it"
        scheme, _, said = headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(said.encode("latin-1"), self._key)
        if self._key and path != "/health" and not known:
            return 401, "this server has an API key: a request says it as 'Authorization: Bearer KEY'"
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return 415, f"content-type {kind!r}: a request is application/json"
        return None

    def _admits(self, url: str) -> bool:
        try:
            host = urlsplit(url).hostname or ""
            return bool({host, "*"} & self._hosts) or (bool({"0.0.0.0", "::"} & self._hosts) and bool(ip_address(host)))
        except ValueError:  # it is no address, or no URL
            return False


_VALUE = 200  # characters that a wrong value may have, for the reason stands after it
OptionRule = tuple[Callable[[Any], bool], str]
"""Whether a value is one of the option, and what such values are."""


def _number(noun: str, kinds: tuple[type, ...], low: float, high: float) -> OptionRule:
    def fits(value: Any) -> bool:
        return type(value) in kinds and bool(low <= value <= high)  # True is no number here

    return fits, f"{noun} from {low} to {high}"


_whole, _real = partial(_number, "a whole number", (int,)), partial(_number, "a number", (int, float))


def _is_stop(value: Any) -> bool:
    strings = [value] if isinstance(value, str) else value
    return isinstance(strings, list) and len(strings) <= _STOPS and all(isinstance(s, str) and s for s in strings)


_STOPS = 4
_OF_THE_CALL = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "load_audio_from_video"}
"""No client brings a template of its own: it is a program, which need not end."""
_RULES: dict[str, OptionRule] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), _whole(1, 2**31 - 1)),
    "temperature": _real(0, 2),
    "top_p": _real(0, 1),
    "top_k": _whole(0, 2**31 - 1),
    "seed": _whole(0, 2**63 - 1),
    **dict.fromkeys(("stream", "echo"), (lambda value: isinstance(value, bool), "true or false")),
    "top_logprobs": _whole(0, 20),
    "stop": (_is_stop, f"a string or a list of strings, at most {_STOPS}"),
    "tools": (lambda value: isinstance(value, list) and all(isinstance(t, dict) for t in value), "a list of objects"),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
}
_few = _whole(0, 5)
_LOGPROBS: dict[str, OptionRule] = {
    "prompt": (lambda value: value is False or _few[0](value), _few[1]),
    "messages": _RULES["stream"],
}
"""In completions a number, in chat a switch, as OpenAI has them."""
_NO_EFFECT = ("user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls")
_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "modalities": (["text"],),
    **dict.fromkeys(("suffix", "reasoning_effort", "generation_config", "audio", "functions", "function_call"), ()),
    **dict.fromkeys(("prediction", "web_search_options"), ()),
}
"""Options that nothing here follows: the values at which that makes no difference."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


def malformed(body: Any, content: str) -> str | None:
    """What is wrong with ``body``, whose text is in ``content``: "prompt" or "messages"; None if nothing is."""
    if not isinstance(body, Mapping):
        return f"the body must be a JSON object, not {type(body).__name__}"
    unknown = sorted(map(str, body.keys() - {"model", content, "logprobs", *_RULES, *_ONLY, *_NO_EFFECT}))
    if unknown:
        return f"there is no option {', '.join(unknown)}"
    for name, values in _ONLY.items():
        if name in body and body[name] not in values:
            return f"{name}={_short(body[name])} is not supported: leave it out"
    rules = {**_RULES, "logprobs": _LOGPROBS[content]}
    if body.get("echo") is True:
        rules["max_tokens"] = _whole(0, 2**31 - 1)  # the prompt alone
    for name, (fits, description) in rules.items():
        if name in body and not fits(body[name]):
            return f"{name}={_short(body[name])} is not {description}"
    if reserved := sorted(body.get("chat_template_kwargs", {}).keys() & _OF_THE_CALL):
        return f"chat_template_kwargs has {', '.join(reserved)}, which the server says itself"
    if body.get("top_logprobs") and body.get("logprobs") is not True:
        return "top_logprobs is given without logprobs=true"
    if body.get("top_p") == 0:
        return "top_p=0 leaves no token: temperature=0 takes the most likely one"
    if content == "messages":
        return _messages(body.get("messages"))
    prompt = body.get("prompt")
    if _is_prompt(prompt) or (isinstance(prompt, list) and prompt and all(map(_is_prompt, prompt))):
        return None
    items = enumerate(prompt if isinstance(prompt, list) else ())
    wrong = ((f"prompt[{i}]", item) for i, item in items if not _is_prompt(item) and not _is_prompt([item]))
    name, value = next(wrong, ("prompt", prompt))  # a long prompt is not told whole
    return f"{name}={_short(value)} is not a string of one or more characters, token ids, or a list of such prompts"


def _is_prompt(value: Any) -> bool:
    tokens = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    return bool(value) and (isinstance(value, str) or tokens)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE else f"{text[:_VALUE]} ..."


def _messages(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "messages must be a list of one or more messages"
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            return f"messages[{i}] must be an object whose role is one of {', '.join(_ROLES)}"
        content = message.get("content", "")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                return f"the content of messages[{i}] must be text"
        if not _calls(message.get("tool_calls", [])):
            return f"tool_calls of messages[{i}] must be objects whose function has arguments, an object or its JSON"
    return None


def _calls(calls: Any) -> bool:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return False
    functions = [call.get("function") or call for call in calls]
    return all(isinstance(f, dict) and isinstance(f.get("arguments"), dict | str) for f in functions)
