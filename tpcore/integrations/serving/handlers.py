"""transformers' handlers of OpenAI's requests: what they take, and an answer that has the parts of a stream."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from openai.types.completion_usage import CompletionUsage
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import ReasoningText, ToolCall, build_response_parser


class _Sampled:
    """A temperature above 0 samples, whatever the model's default is. ``top_k`` is no option of OpenAI's."""

    _kind = ""
    _valid_params_class: Any

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
        return config


class Chat(_Sampled, ChatCompletionHandler):
    _kind = "chat completions"

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
            text if parser is None else text.strip(),
            model_id,
            finish_reason="tool_calls" if calls else "length" if cut else "stop",
            usage=CompletionUsage(prompt_tokens=asked, completion_tokens=answered, total_tokens=asked + answered),
            tool_calls=calls or None,
            reasoning_content=thought.strip() or None,
        )
        return JSONResponse(answer)


class Completions(_Sampled, CompletionHandler):
    _kind = "completions"
