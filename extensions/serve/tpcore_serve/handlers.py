"""transformers' handlers of OpenAI's requests: what they take, and an answer that has the parts of a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from openai.types.completion_usage import CompletionUsage
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import Modality, ReasoningText, ToolCall, build_response_parser


class _Sampled:
    """A temperature above 0 samples, whatever the model's default is. ``top_k`` is no option of OpenAI's."""

    _kind = ""
    _valid_params_class: Any
    _continues = False

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
        config.continues = self._continues
        return config


class Chat(_Sampled, ChatCompletionHandler):
    _kind = "chat completions"

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
        text = "".join(part for part in parts if type(part) is str)
        thought = "".join(part for part in parts if isinstance(part, ReasoningText))
        calls = [
            {"id": f"{request_id}_tool_call_{i}", "type": "function", "function": vars(call)}
            for i, call in enumerate(part for part in parts if isinstance(part, ToolCall))
        ]
        asked, answered = len(inputs["input_ids"]), stream.total_tokens
        cut = gen_config.max_new_tokens is not None and answered >= gen_config.max_new_tokens
        answer = self._build_completion(
            request_id,
            text,
            model_id,
            finish_reason="tool_calls" if calls else "length" if cut else "stop",
            usage=CompletionUsage(prompt_tokens=asked, completion_tokens=answered, total_tokens=asked + answered),
            tool_calls=calls or None,
            reasoning_content=thought or None,
        )
        return JSONResponse(answer)


class Completions(_Sampled, CompletionHandler):
    _kind = "completions"
    _continues = True

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
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return tokenizer(self._short_enough(prompt))
        if max(prompt) >= len(tokenizer):
            raise HTTPException(400, f"the prompt has token {max(prompt)}, and there are {len(tokenizer)} tokens")
        return {"input_ids": prompt}
