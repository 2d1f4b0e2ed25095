"""The program that ``tpcore serve`` starts once per rank. Arguments: LIFELINE SOCKET READY OPTIONS."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from queue import Queue
from typing import Any

import torch
import transformers
import uvicorn
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.generation.continuous_batching.utils import logger as engine_log

from tpcore.errors import BackendError
from tpcore.log import inform, log
from tpcore.processes.launch import follow
from tpcore.runtime.context import current
from tpcore.runtime.init import init
from tpcore.runtime.memory import keep_freed_memory
from tpcore_hf import lazy, parallelize
from tpcore_hf.generate.cached import longrope_length

from . import API_KEY
from .batches import Batches
from .requests import LOCAL, Connection, connections
from .sampling import sample_by_request
from .server import application
from .text import tokenizer_of

_PATIENCE = 10  # seconds for open requests, when the server is told to end
_LAST = 2  # seconds for those that were not answered in it to be told
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open, longer than those of clients (httpx: 5) and proxies (60): a server that
closes first does so while a request is on its way."""
_POLL = 0.1
_FULL = 16
"""Requests of the full length that the caches hold, where memory lets them."""
_OFF_AT_0 = """
diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff min_length min_new_tokens no_repeat_ngram_size
remove_invalid_values renormalize_logits
"""
_OFF_AT_1 = "encoder_repetition_penalty guidance_scale num_beams repetition_penalty typical_p"
_OFF_AT_NONE = """
bad_words_ids begin_suppress_tokens exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id min_p
penalty_alpha sequence_bias suppress_tokens top_h watermarking_config
"""


def _unused(config: Any) -> str:
    """What a generation ``config`` sets and no request gets: it has a temperature, top_k and top_p of its own."""
    off: dict[str, Any] = dict.fromkeys(_OFF_AT_0.split(), 0) | dict.fromkeys(_OFF_AT_1.split(), 1)
    off |= dict.fromkeys(_OFF_AT_NONE.split())
    given = {name: value for name in off if (value := getattr(config, name, None)) is not None}
    return ", ".join(f"{name}={value}" for name, value in given.items() if value != off[name])


def engine_of(folder: str, dtype: str, length: int, requests: int, timeout: float) -> tuple[Any, Any, int]:
    """The sharded model, its engine, and how many tokens a prompt and its answer may have. Collective."""
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        with lazy():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype)
    except RuntimeError as e:  # of sizes that are not the configuration's, above all
        raise ValueError(f"{folder} does not open ({e}): see tpcore export {folder} --for transformers") from None
    parallelize(model.eval())
    config = model.generation_config
    unused = _unused(config)
    if current().rank == 0 and unused:
        inform(f"{unused} of the generation config: not applied")
    text = model.config.get_text_config()
    # beyond it longrope turns keys by the longest of all requests, and a text would depend on the others
    first = longrope_length(text)
    if current().rank == 0 and 0 < first < length:
        inform(f"requests have at most {first} tokens, for which this model's longrope has its short factors")
    max_length = min(text.max_position_embeddings, length, first or length)
    settings = transformers.ContinuousBatchingConfig(
        use_async_batching=False, use_cuda_graph=False, max_requests_per_batch=requests, cpu_group_timeout=timeout
    )
    engine = model.init_continuous_batching(
        transformers.GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=config.eos_token_id),
        settings,
        WorkloadHints(max_prompt_length=max_length, max_generated_length=0, num_requests=min(requests, _FULL)),
    )
    sample_by_request(engine)
    engine.output_router.output_queue = _Unread()
    sizes = engine.continuous_batching_config
    return model, engine, min(max_length, sizes.num_blocks * sizes.page_size) if sizes.num_blocks else max_length


class _Unread(Queue[Any]):
    """For outputs that nobody reads: of cancelled requests, and on all ranks but the first of all."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        pass


class _Told(uvicorn.Server):
    """Tells ``ready`` that it has started before anybody has an answer: a rank that is lost after one has served."""

    def __init__(self, config: uvicorn.Config, ready: int) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        os.write(self._ready, b"1")


async def _served(app: Any, engine: Any, batches: Batches, listener: socket.socket, ready: int) -> bool:
    """Serve until a signal, or until the engine stops. Whether it was a signal."""
    waits: dict[str, Any] = {"timeout_graceful_shutdown": _PATIENCE + _LAST, "timeout_keep_alive": _KEEP_ALIVE}
    # as many as come in one turn are accepted before the first is counted
    doors: dict[str, Any] = {"http": Connection, "ws": "none", "backlog": max(1, connections() // 4)}
    server = _Told(uvicorn.Config(app, log_level="warning", access_log=False, **waits, **doors), ready)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    last = math.inf
    while not serving.done():
        if not engine.is_running():
            server.should_exit = True
        elif server.should_exit:
            last = min(last, time.monotonic() + _PATIENCE)
            if time.monotonic() >= last:
                batches.end()
        await asyncio.wait({serving}, timeout=_POLL)
    return bool(engine.is_running())


def main(lifeline: int, fd: int, ready: int, options: dict[str, Any]) -> int:
    follow(lifeline)
    keep_freed_memory()
    # the engine logs the error of its thread with two tracebacks; whoever waits for it is told, and so is the log
    transformers.logging.set_verbosity_error()
    engine_log.setLevel("CRITICAL")
    threading.excepthook = lambda hook: log.error("%s", hook.exc_value)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn has its own while it runs, and raises the signal again
        signal.signal(number, lambda *_: None)
    tokenizer = tokenizer_of(options["folder"])  # before a rank waits for another
    ctx = init(backend=options["backend"], tp=options["tp"], timeout=options["timeout"])
    engine_options = options["folder"], options["dtype"], options["length"], options["requests"]
    model, engine, limit = engine_of(*engine_options, options["timeout"])
    engine.start()
    if ctx.rank > 0:
        engine.join(time.perf_counter())
        return _failed(engine)
    batches = Batches(engine, limit, options["requests"])
    app = application(options["name"], model, tokenizer, batches, (*LOCAL, *options["hosts"]), API_KEY.get())
    if asyncio.run(_served(app, engine, batches, socket.socket(fileno=fd), ready)):
        engine.stop(block=True, timeout=_PATIENCE, hard_stop=True)
        return 0
    return _failed(engine)


def _failed(engine: Any) -> int:
    """The exit code of a rank whose engine has ended: of an error, which is logged, or as it was told."""
    error = engine.background_thread_status.fatal_error
    if error is None:
        return 0
    log.error("%s: %s", type(error).__name__, error)
    return 1


if __name__ == "__main__":
    try:
        code = main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
    except (BackendError, ValueError, OSError) as error:
        log.error("%s: %s", type(error).__name__, error)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # threads of an engine that lost a rank may wait for it
