"""Requests in the engine: their limits, the strings at which they stop, and their end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBStreamer,
    ToolCall,
    _StreamError,
    response_events_to_chunks,
)

from .sampling import Likelihood, Names, Passage
from .text import Text

_ENDED = "a rank failed, and the ranks start again: ask again"
_TOLD = "the server was told to end before this answer was complete"


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class Batches(CBGenerateManager):
    """transformers' manager of one engine that runs already."""

    def __init__(self, engine: Any, limit: int, most: int) -> None:
        """``limit``: tokens of a prompt and its answer. ``most``: how many requests may be open."""
        super().__init__()
        self._cb: Any = engine
        self.limit, self.most = limit, most
        self._names: Names | None = None
        self.totals = dict.fromkeys(("requests", "requests_refused", "prompt_tokens", "generated_tokens"), 0)

    def counts(self) -> tuple[int, int]:
        """Requests in the engine's batch, and those that wait for a place in it."""
        processor = self._cb.batch_processor
        running = len(processor.scheduler.active_requests) if processor is not None else 0
        return running, max(0, len(self._cb.output_router.result_handlers) - running)

    def end(self) -> None:
        """End all open requests."""
        for callback, _ in [*self._cb.output_router.result_handlers.values()]:
            callback(SimpleNamespace(error=_TOLD, is_finished=lambda: True))

    def is_alive(self) -> bool:
        # another rank's error ends the engine here without one
        return bool(self._cb.is_running()) and super().is_alive()

    def admit(self) -> None:
        """An error if there is no place for one request more."""
        if not self.is_alive():
            raise HTTPException(503, _ENDED)
        if len(self._cb.output_router.result_handlers) >= self.most:
            self.totals["requests_refused"] += 1
            raise HTTPException(429, f"{self.most} requests are open, and no more are taken: try again later")

    def _short_enough(self, ids: list[int]) -> list[int]:
        if not ids:
            raise HTTPException(400, "the prompt has no tokens")
        if len(ids) >= self.limit:
            message = f"the prompt has {len(ids)} tokens, and prompt and answer may have {self.limit} together"
            raise HTTPException(400, message)
        return ids

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Stream]:
        self.admit()
        ids = self._short_enough(inputs["input_ids"])
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, self.limit - len(ids))
        logprobs, echoed = gen_config.logprobs, inputs.get("echo")
        asked = {} if logprobs is None else {"logprobs": logprobs, "echo": echoed is not None}
        seed = getattr(gen_config, "seed", None)
        sampled = gen_config.do_sample and gen_config.temperature != 0
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        if response_parser is not None:
            prompt = processor.decode(ids)
            if response_parser._spec.truncate_past_last_anchor(prompt) == prompt:  # else it begins with the prompt
                response_parser.initial_events = []
        text = Text(processor, ids if gen_config.continues else [], special=response_parser is not None)
        options = {"response_parser": response_parser, "config": gen_config, "totals": self.totals}
        self._names = self._names or Names(processor)  # of the one model
        options |= {"names": self._names if asked else None, "prompt": ids, "echo": echoed}
        stream = Stream(self._cb, request_id, text, loop, queue, **options)
        self._cb.register_result_handler(request_id, stream.take)
        accepted = self._cb.add_request(
            ids,
            request_id=request_id,
            streaming=True,
            max_new_tokens=max(1, gen_config.max_new_tokens),
            eos_token_id=gen_config.eos_token_id,
            temperature=float(1.0 if gen_config.temperature is None else gen_config.temperature) if sampled else 0.0,
            top_k=int(gen_config.top_k or 0),
            top_p=float(1.0 if gen_config.top_p is None else gen_config.top_p),
            seed=random.getrandbits(32) if seed is None else seed,  # of the first rank, for all
            **asked,
        )
        if accepted is None:
            self._cb.output_router.result_handlers.pop(request_id)
            raise HTTPException(503, _ENDED)
        self.totals["requests"] += 1
        self.totals["prompt_tokens"] += len(ids)
        return queue, stream

    async def parts(self, *request: Any, **options: Any) -> tuple[list[Any], Stream]:
        """All that the stream of a request has: text, and with a parser reasoning and calls of tools."""
        queue, stream = self.generate_streaming(*request, **options)
        parts: list[Any] = []
        try:
            while (part := await queue.get()) is not None:
                if isinstance(part, Failure):
                    raise part.error
                parts.append(part)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return parts, stream


class Failure(_StreamError):
    """The end of a request that failed."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(json.dumps(f"{status} {why}")[1:-1])  # transformers puts it between quotes
        self.error = HTTPException(status, why)


class Stream(CBStreamer):
    """The text of one request, up to the first of the strings at which it stops."""

    def __init__(
        self,
        engine: Any,
        request_id: str,
        text: Text,
        *args: Any,
        config: Any,
        totals: dict[str, int],
        names: Names | None = None,
        prompt: Sequence[int] = (),
        echo: tuple[str, list[int]] | None = None,
        **options: Any,
    ) -> None:
        """``config``: of the generation, with ``stop_strings``. ``totals``: where tokens are counted. ``names``: of
        tokens, if their log-probabilities are told. ``echo``: if the answer begins with it, the text of the ``prompt``,
        and where each token begins in it."""
        nothing: Any = None  # for transformers' decoder
        super().__init__(engine, request_id, nothing, *args, **options)
        self._text, self._totals = text, totals
        self._config, self._pending, self._over = config, "", False
        stops, ends = config.stop_strings or [], config.eos_token_id
        self._stops = [stops] if isinstance(stops, str) else stops
        self._ends = ends if isinstance(ends, list) else [ends]
        self.tokens: list[int] = []
        self._names, self._prompt, self._echo = names, prompt, echo
        self._before = 0 if echo is None else len(echo[0])  # characters of the choice before the answer
        self._entries: list[Likelihood] = []  # which no part has yet

    def take(self, output: Any) -> None:
        """The engine's callback, in the server's loop: an error here would also keep the step from other requests."""
        if self._over:
            return
        try:
            self._take(output)
        except Exception as e:  # noqa: BLE001  the parser has no error of its own for a malformed call
            self.cancel()
            why = "the model's answer is not as its template says: " if self._parser is not None else ""
            self._queue.put_nowait(Failure(500, why + first_line(e)))

    def _take(self, output: Any) -> None:
        if output.error is not None:
            self._over = True
            told = output.error == _TOLD
            why = f"a rank failed, and the ranks start again: {(output.error or 'no message').splitlines()[0]}"
            self._queue.put_nowait(Failure(503, _TOLD if told else why))
            return
        if self._echo is not None and (output.generated_tokens or output.is_finished()):
            self._begin(output, *self._echo)
        if self._config.max_new_tokens == 0:
            self._over = True
            self.end()
            return
        for token in output.generated_tokens[len(self.tokens) :]:
            self._note(token, output)
            self.tokens.append(token)
            self.total_tokens += 1
            self._totals["generated_tokens"] += 1
            if self._parser is not None or token not in self._ends:  # a template may name the end token
                self._feed(self._text.add(token))
            if self._over:
                return
        if output.is_finished():
            self._feed(self._text.rest())
            if not self._over:
                self._end(self._pending, self.tokens[-1] in self._ends)

    def _begin(self, output: Any, text: str, offsets: list[int]) -> None:
        """Send the prompt. Its first token has nothing that it could be likely after."""
        self._echo = None
        if self._names is not None:
            self._entries = [Likelihood(self._names.of(self._prompt[0]), offsets[0], None, [])]
            those = zip(offsets[1:], output.logprobs, strict=False)
            self._entries += [self._names.entry(offset, each) for offset, each in those]
        self._queue.put_nowait(self._with_entries(text))

    def _note(self, token: int, output: Any) -> None:
        if self._names is not None:
            place = len(output.logprobs) - len(output.generated_tokens) + len(self.tokens)
            self._entries.append(self._names.entry(self._before + self._text.length, output.logprobs[place]))

    def _with_entries(self, part: str) -> str:
        """``part`` with the entries that have come, if they are asked for."""
        if self._entries:
            part = Passage(part) if type(part) is str else part
            part.entries, self._entries = self._entries, []  # type: ignore[attr-defined]
        return part

    def _feed(self, text: str) -> None:
        text = self._pending + text
        at = min((i for stop in self._stops if (i := text.find(stop)) >= 0), default=None)
        if at is not None:
            self.cancel()
            self._end(text[:at], True)
            return
        overlap = max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        self._pending = text[len(text) - overlap :]
        self._send(text[: len(text) - overlap])

    def _send(self, text: str) -> None:
        parser: Any = self._parser
        if text and parser is None:
            self._queue.put_nowait(self._with_entries(text))
        elif text:
            self._put(parser.feed(text))

    def _put(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            values = event.get("value")
            if event.get("field") != "tool_calls" or not isinstance(values, list):
                values = [values]
            for each in values:  # a region may have several calls
                for item in response_events_to_chunks([event | {"value": each}]):
                    if isinstance(item, ToolCall):
                        (item.name + item.arguments).encode()  # an error of what is no text
                    self._queue.put_nowait(self._with_entries(item) if isinstance(item, str) else item)

    def end(self) -> None:
        parser: Any = self._parser
        if parser is not None:
            try:
                self._put(parser.finalize()[1])
            except (ValueError, RuntimeError):
                if self.tokens[-1] in self._ends:  # it was not cut: what is open is malformed
                    raise
        if self._entries:
            self._queue.put_nowait(self._with_entries(""))
        self._queue.put_nowait(None)

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
