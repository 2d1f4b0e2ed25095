"""transformers' handlers of OpenAI's requests: what they take, and an answer that has the parts of a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from openai.types.completion_usage import CompletionUsage
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import Modality, ReasoningText, ToolCall, build_response_parser

from .sampling import of_chat, of_completion
from .text import Text


class _Sampled:
    """A temperature above 0 samples, whatever the model's default is. ``top_k`` is no option of OpenAI's."""

    _kind = ""
    _valid_params_class: Any
    _continues = False
    _told: Callable[..., dict[str, Any]]
    _logprobs: Callable[..., int | None]

    def _build_chunk_sse(self, *args: Any, **options: Any) -> str:
        line: str = super()._build_chunk_sse(*args, **options)  # type: ignore[misc]
        entries = [entry for part in options.values() for entry in getattr(part, "entries", ())]
        if not entries:
            return line
        chunk = json.loads(line.removeprefix("data: "))
        chunk["choices"][0]["logprobs"] = self._told(entries)
        return f"data: {json.dumps(chunk)}\n\n"

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """transformers' own tokenizes in the loop, where all others would wait for it."""
        self._validate_request(body)
        handler: Any = self
        name, model, tokenizer = handler._resolve_model(body)
        handler.generation_state.manager.admit()
        inputs = await asyncio.to_thread(handler._tokenized, tokenizer, body)
        config = self._build_generation_config(body, model.generation_config, use_cb=True)
        request = request_id, model, tokenizer, name, inputs, config, handler.generation_state.manager
        more = {"tools": body["tools"]} if "tools" in body else {}
        if body.get("stream"):
            return handler._streaming(*request, **more)
        return await handler._non_streaming(*request, **more)

    def _short_enough(self, text: str) -> str:
        """``text``, if it may be one of so many tokens: to tokenize megabytes takes seconds."""
        most = self.generation_state.most_characters  # type: ignore[attr-defined]
        if len(text) > most:
            raise HTTPException(400, f"the prompt has {len(text)} characters, and its tokens have at most {most}")
        return text

    def _validate_request(self, body: dict[str, Any]) -> None:
        unknown = sorted(body.keys() - {"top_k"} - self._valid_params_class.__mutable_keys__)
        if unknown:
            hint = ": max_tokens is their limit" if unknown == ["max_completion_tokens"] else ""
            raise HTTPException(400, f"{self._kind} have no option {', '.join(unknown)}{hint}")

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **options: Any) -> Any:
        config = super()._build_generation_config(body, *args, **options)  # type: ignore[misc]
        if body.get("temperature"):
            config.do_sample = True
        config.top_k, config.seed = body.get("top_k", config.top_k), body.get("seed")
        config.continues, config.logprobs = self._continues, self._logprobs(body)
        return config


class Chat(_Sampled, ChatCompletionHandler):
    _kind = "chat completions"
    _told = staticmethod(of_chat)

    def _logprobs(self, body: dict[str, Any]) -> int | None:
        return body.get("top_logprobs", 0) if body.get("logprobs") else None

    def _tokenized(self, tokenizer: Any, body: dict[str, Any]) -> Any:
        messages = self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
        options = {"add_generation_prompt": True, "tools": body.get("tools")} | body.get("chat_template_kwargs", {})
        self._short_enough(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        return tokenizer.apply_chat_template(messages, return_dict=True, **options)

    async def _non_streaming(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        inputs: Any,
        gen_config: Any,
        gen_manager: Any,
        tools: Any = None,
    ) -> JSONResponse:
        """transformers' own parses all tokens again, with those of a stop string and of a call that is cut off."""
        parser = build_response_parser(processor, model, inputs["input_ids"], tools=tools)
        parts, stream = await gen_manager.parts(
            model, processor, inputs, gen_config, request_id, response_parser=parser
        )
        text = "".join(part for part in parts if isinstance(part, str) and not isinstance(part, ReasoningText))
        thought = "".join(part for part in parts if isinstance(part, ReasoningText))
        calls = [
            {"id": f"{request_id}_tool_call_{i}", "type": "function", "function": vars(call)}
            for i, call in enumerate(part for part in parts if isinstance(part, ToolCall))
        ]
        asked, answered = len(inputs["input_ids"]), stream.total_tokens
        answer = self._build_completion(
            request_id,
            text,
            model_id,
            finish_reason="tool_calls" if calls else _reason(gen_config, answered),
            usage=CompletionUsage(prompt_tokens=asked, completion_tokens=answered, total_tokens=asked + answered),
            tool_calls=calls or None,
            reasoning_content=thought or None,
        )
        if gen_config.logprobs is not None:
            answer["choices"][0]["logprobs"] = of_chat(_entries(parts))
        return JSONResponse(answer)


class Completions(_Sampled, CompletionHandler):
    _kind = "completions"
    _continues = True
    _told = staticmethod(of_completion)

    def _logprobs(self, body: dict[str, Any]) -> int | None:
        asked = body.get("logprobs")
        return None if asked is False else asked

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Several prompts are requests of their own, whose answers are the choices of one; an error ends them all."""
        handler: Any = self
        one, prompts, most = super().handle_request, body["prompt"], handler.generation_state.manager.most
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            return await one(body, request_id)
        if len(prompts) == 1:
            return await one(body | {"prompt": prompts[0]}, request_id)
        if body.get("stream"):
            raise HTTPException(400, f"{len(prompts)} prompts have no stream: ask for one prompt, or without stream")
        if len(prompts) > most:
            raise HTTPException(400, f"{len(prompts)} prompts are more than the {most} requests that may be open")
        tasks = [
            asyncio.ensure_future(one(body | {"prompt": prompt}, f"{request_id}-{i}"))
            for i, prompt in enumerate(prompts)
        ]
        try:
            answers = [json.loads(answer.body) for answer in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()
        choices = [answer["choices"][0] | {"index": i} for i, answer in enumerate(answers)]
        usage = {key: sum(answer["usage"][key] for answer in answers) for key in answers[0]["usage"]}
        return JSONResponse(answers[0] | {"id": request_id, "choices": choices, "usage": usage})

    def _tokenized(self, tokenizer: Any, body: dict[str, Any]) -> Any:
        prompt, echo = body["prompt"], body.get("echo", False)
        if isinstance(prompt, str):
            offsets = echo and tokenizer.is_fast
            inputs = {**tokenizer(self._short_enough(prompt), return_offsets_mapping=offsets)}
        elif max(prompt) >= len(tokenizer):
            raise HTTPException(400, f"the prompt has token {max(prompt)}, and there are {len(tokenizer)} tokens")
        else:
            inputs = {"input_ids": prompt}
        if echo:
            inputs["echo"] = _echo(tokenizer, prompt, inputs)
        return inputs

    async def _non_streaming(self, request_id: str, *request: Any) -> JSONResponse:
        """transformers' own has no log-probabilities."""
        model, processor, model_id, inputs, gen_config, gen_manager = request
        parts, stream = await gen_manager.parts(model, processor, inputs, gen_config, request_id)
        asked, answered = len(inputs["input_ids"]), stream.total_tokens
        told = {} if gen_config.logprobs is None else {"logprobs": of_completion(_entries(parts))}
        choice = {"text": "".join(parts), "index": 0, "finish_reason": _reason(gen_config, answered), **told}
        usage = {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
        answer = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model_id}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})


def _reason(config: Any, answered: int) -> str:
    """Why an answer ended. Without ``max_new_tokens`` it has been told to."""
    return "length" if config.max_new_tokens is not None and answered >= config.max_new_tokens else "stop"


def _entries(parts: list[Any]) -> list[Any]:
    return [entry for part in parts for entry in getattr(part, "entries", ())]


def _echo(tokenizer: Any, prompt: str | list[int], inputs: dict[str, Any]) -> tuple[str, list[int]]:
    """The prompt's text, as it was sent or what its tokens say, and where in it each token begins."""
    if "offset_mapping" in inputs:
        offsets, end = [], 0
        for first, last in inputs["offset_mapping"]:  # tokens that the tokenizer adds have no text
            offsets.append(first if last > first else end)
            end = max(end, last)
        return str(prompt), offsets
    text, offsets, pieces = Text(tokenizer, [], special=False), [], []
    for token in inputs["input_ids"]:
        offsets.append(text.length)
        pieces.append(text.add(token))
    return prompt if isinstance(prompt, str) else "".join([*pieces, text.rest()]), offsets
