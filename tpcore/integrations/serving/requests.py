"""What a request may say: each wrong value is one sentence, with the value and what there is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

_NUMBERS: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, 2**31 - 1),
    "max_completion_tokens": (int, 1, 2**31 - 1),
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, 0, 2**31 - 1),
    "seed": (int, 0, 2**63 - 1),
}
_NO_EFFECT = ("user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls")
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "generation_config": (),
    **dict.fromkeys(("audio", "functions", "function_call", "prediction", "web_search_options"), ()),
}
"""Options that nothing here follows: the values at which that makes no difference."""
_OF_THE_CALL = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "load_audio_from_video"}
"""No client brings a template of its own: it is a program, which need not end."""
_STOPS = 4
_ROLES = ("system", "developer", "user", "assistant", "tool")


def malformed(body: Any, content: str) -> str | None:
    """What is wrong with ``body``, whose text is in ``content``: "prompt" or "messages"; None if nothing is."""
    if not isinstance(body, Mapping):
        return f"the body must be a JSON object, not {type(body).__name__}"
    known = {"model", "stream", "stop", "tools", "chat_template_kwargs", content, *_NUMBERS, *_ONLY, *_NO_EFFECT}
    unknown = sorted(map(str, body.keys() - known))
    if unknown:
        return f"there is no option {', '.join(unknown)}"
    for name, values in _ONLY.items():
        if name in body and body[name] not in values:
            return f"{name}={body[name]!r} is not supported: leave it out"
    return _numbers(body) or _stop(body) or (_prompt(body) if content == "prompt" else _messages(body))


def _numbers(body: Mapping[str, Any]) -> str | None:
    for name, (kind, low, high) in _NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        wanted = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted) or not low <= value <= high:
            called = "a whole number" if kind is int else "a number"
            return f"{name}={value!r} is not {called} from {low} to {high}"
    if body.get("top_p") == 0:
        return "top_p=0 leaves no token: temperature=0 takes the most likely one"
    return None


def _stop(body: Mapping[str, Any]) -> str | None:
    if not isinstance(body.get("stream") or False, bool):
        return f"stream={body['stream']!r} is not true or false"
    options = body.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        return "chat_template_kwargs must be an object"
    taken = sorted(options.keys() & _OF_THE_CALL)
    if taken:
        return f"chat_template_kwargs has {', '.join(taken)}, which the server says itself"
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stop is not None and not (isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)):
        return f"stop={stop!r} is not a string or a list of strings"
    return f"stop has {len(stops)} strings, and may have {_STOPS}" if stops and len(stops) > _STOPS else None


def _prompt(body: Mapping[str, Any]) -> str | None:
    prompt = body.get("prompt")
    return None if isinstance(prompt, str) and prompt else f"prompt={prompt!r} is not a string that says something"


def _messages(body: Mapping[str, Any]) -> str | None:
    messages = body.get("messages")
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
    tools = body.get("tools", [])
    return None if isinstance(tools, list) and all(isinstance(t, dict) for t in tools) else "tools must be objects"


def _calls(calls: Any) -> bool:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return False
    functions = [call.get("function") or call for call in calls]
    return all(isinstance(f, dict) and isinstance(f.get("arguments"), dict | str) for f in functions)
