"""Requests in the engine: their limits, their sampling, the strings at which they stop, and their end."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBStreamer,
    CBWorkerDeadError,
    _StreamError,
    response_events_to_chunks,
)

_ENDED = "a rank failed, and the ranks start again: ask again"


class Batches(CBGenerateManager):
    """transformers' manager of one engine that runs already."""

    def __init__(self, engine: Any, limit: int, most: int) -> None:
        """``limit``: tokens of a prompt and its answer. ``most``: how many requests may be open."""
        super().__init__()
        self._cb: Any = engine
        self.limit, self._most = limit, most

    def counts(self) -> tuple[int, int]:
        """Requests in the engine's batch, and those that wait for a place in it."""
        processor = self._cb.batch_processor
        running = len(processor.scheduler.active_requests) if processor is not None else 0
        return running, max(0, len(self._cb.output_router.result_handlers) - running)

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """The engine runs since before the first request."""

    def is_alive(self) -> bool:
        # another rank's error ends the engine here without one
        return bool(self._cb.is_running()) and super().is_alive()

    def _check_alive(self, request_id: str) -> None:
        if not self.is_alive():
            raise CBWorkerDeadError(_ENDED)

    def _room(self, ids: list[int]) -> int:
        """How many tokens may follow the prompt ``ids``."""
        if not ids:
            raise HTTPException(400, "the prompt has no tokens")
        if len(ids) >= self.limit:
            told = f"the prompt has {len(ids)} tokens, and prompt and answer may have {self.limit} together"
            raise HTTPException(400, told)
        return self.limit - len(ids)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Stream]:
        self._check_alive(request_id)
        if len(self._cb.output_router.result_handlers) >= self._most:
            raise HTTPException(429, f"{self._most} requests are open, and no more are taken: try again later")
        ids = inputs["input_ids"]
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, self._room(ids))
        seed = getattr(gen_config, "seed", None)
        sampled = gen_config.do_sample and gen_config.temperature != 0
        found: asyncio.Queue[Any] = asyncio.Queue()
        tokenizer = getattr(processor, "tokenizer", processor)
        stops = gen_config.stop_strings or []
        stream = Stream(
            self._cb,
            request_id,
            tokenizer._tokenizer,
            asyncio.get_running_loop(),
            found,
            response_parser=response_parser,
            stops=[stops] if isinstance(stops, str) else stops,
            config=gen_config,
        )
        self._cb.register_result_handler(request_id, stream.take)
        taken = self._cb.add_request(
            ids,
            request_id=request_id,
            streaming=True,
            max_new_tokens=gen_config.max_new_tokens,
            eos_token_id=gen_config.eos_token_id,
            temperature=float(1.0 if gen_config.temperature is None else gen_config.temperature) if sampled else 0.0,
            top_k=int(gen_config.top_k or 0),
            top_p=float(1.0 if gen_config.top_p is None else gen_config.top_p),
            seed=random.getrandbits(32) if seed is None else seed,  # of the first rank, for all
        )
        if taken is None:
            self._cb.output_router.result_handlers.pop(request_id)
            raise CBWorkerDeadError(_ENDED)
        return found, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        found, stream = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        parts: list[str] = []
        try:
            while (part := await found.get()) is not None:
                if isinstance(part, _StreamError):
                    raise CBWorkerDeadError(json.loads(f'"{part.msg}"'))
                parts.append(part)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return "".join(parts), len(inputs["input_ids"]), stream.tokens


class Stream(CBStreamer):
    """The text of one request, up to the first of its ``stops``."""

    def __init__(self, *args: Any, stops: list[str], config: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stops, self._config, self._held, self._over = stops, config, "", False
        ends = config.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        self.tokens: list[int] = []

    def take(self, output: Any) -> None:
        """The engine's callback, in the loop of the server."""
        if self._over:
            return
        if output.error is not None:
            self._over = True
            why = f"a rank failed, and the ranks start again: {output.error.splitlines()[0]}"
            self._queue.put_nowait(_StreamError(json.dumps(why)[1:-1]))  # transformers puts it between quotes
            return
        for token in output.generated_tokens[len(self.tokens) :]:
            self.tokens.append(token)
            self.total_tokens += 1
            self._feed(self._decode_stream.step(self._tokenizer, token) or "")
            if self._over:
                return
        if output.is_finished():
            self._end(self._held, self.tokens[-1] in self._ends)

    def _feed(self, text: str) -> None:
        text = self._held + text
        at = min((i for stop in self._stops if (i := text.find(stop)) >= 0), default=None)
        if at is not None:
            self.cancel()
            self._end(text[:at], True)
            return
        begun = max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - begun :]
        self._send(text[: len(text) - begun])

    def _send(self, text: str) -> None:
        parser: Any = self._parser
        if text and parser is None:
            self._queue.put_nowait(text)
        elif text:
            for item in response_events_to_chunks(parser.feed(text)):
                self._queue.put_nowait(item)

    def _end(self, rest: str, stopped: bool) -> None:
        if stopped:
            self._config.max_new_tokens = None  # else transformers calls the end with the last token "length"
        self._send(rest)
        self._over = True
        self.end()

    def cancel(self) -> None:
        """Take the request out of the engine, and let it be forgotten here."""
        self._over = True
        super().cancel()
        self._cb.output_router.result_handlers.pop(self._request_id, None)
