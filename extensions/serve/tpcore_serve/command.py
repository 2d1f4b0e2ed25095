"""``tpcore serve``: the ranks of a server, started again when one is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from tpcore.backend.registry import check_fits, check_held, load_backend
from tpcore.c10d.supervision.rendezvous import host_store
from tpcore.cli.console import echo
from tpcore.errors import counted, described, extra
from tpcore.layout.mesh import Mesh
from tpcore.processes.launch import Processes, serving_environment
from tpcore.runtime.context import ParallelContext
from tpcore.runtime.init import default_backend

from . import API_KEY

_RANK = "tpcore_serve.rank"
_GRACE = 4.0  # seconds for the first rank to answer open requests after another one was lost
_PATIENCE = 15.0  # seconds for open requests when the server is told to end
_POLL = 0.05


def serve(
    folder: Path = typer.Argument(help="A language model in transformers' files."),
    tp: int = typer.Option(2, min=1, help="Ranks, on this host."),
    host: str = typer.Option("127.0.0.1", help="The address to listen at; 0.0.0.0 lets others in."),
    allow_host: list[str] = typer.Option([], help="A name besides localhost by which clients ask; * for all."),
    port: int = typer.Option(8000, min=0, max=65535, help="0 takes a free one."),
    dtype: str = typer.Option("auto", help="float32, bfloat16, float16, or the files'."),
    name: str = typer.Option("", help="The model's name in requests. Default: the folder's."),
    max_length: int = typer.Option(2048, min=2, help="Tokens of a prompt and its answer, at most the model's."),
    max_requests: int = typer.Option(64, min=1, help="Open requests; more are told to try again."),
    api_key: str = typer.Option("", help=f"Which clients have to say. Default: {API_KEY.name}, else none."),
    backend: str = typer.Option("", help="Default: what tpcore.init takes here."),
    timeout: float = typer.Option(60.0, min=1, help="Seconds that a rank waits for the others."),
) -> None:
    """Serve a model, sharded over ranks of this host, over HTTP.

    As OpenAI's completions and chat, with streaming. Requests are batched as they come. Ctrl-C or SIGTERM ends it
    when open requests are answered.

    \b
    Examples:
      tpcore serve path/to/model --tp 2
      tpcore serve path/to/model --tp 4 --host 0.0.0.0 --allow-host name.of.host

    Docs: docs/serve.md
    """
    with extra("serve", "tpcore serve"):
        for module in ("fastapi", "uvicorn", "openai", "transformers", "psutil"):
            import_module(module)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: it is no model in transformers' files")
    if not any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir()):
        raise ValueError(f"{folder} has no weights, .safetensors or .bin: model.save_pretrained({str(folder)!r})")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype}: there are auto, float32, bfloat16 and float16")
    options = {"folder": str(folder), "tp": tp, "dtype": dtype, "name": name or folder.resolve().name}
    options |= {"length": max_length, "requests": max_requests, "backend": backend or None, "timeout": timeout}
    options["hosts"] = [host, *allow_host]
    refuse(folder, tp, backend or None)
    key = {API_KEY.name: api_key or API_KEY.text()}  # an argument of the ranks would stand in the list of processes
    try:
        listener = socket.create_server((host, port))
    except OSError as e:
        raise ValueError(f"cannot listen at {host}:{port}: {e.strerror}") from None
    ended: list[int] = []  # the signals to end that have come
    handlers = {n: signal.signal(n, lambda n, _: ended.append(n)) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        with listener:
            raise typer.Exit(_rounds(options, key, listener, ended))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def refuse(folder: Path, tp: int, backend: str | None) -> None:
    """Raise, before a rank is started, what each of ``tp`` would: of the backend here, and of this model's files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tpcore_explain.recording import Recorder, RecordingBackend
    from tpcore_hf import parallelize

    from .text import tokenizer_of

    name, mesh = backend or default_backend()[0], Mesh({"tp": tp})
    check_fits(load_backend(name), mesh)
    check_held(name, tp, "--tp")
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config)
    parallelize(model.eval(), ctx=ParallelContext(RecordingBackend(tp - 1, tp, Recorder()), mesh, tp - 1))
    tokenizer_of(str(folder))


def _rounds(options: dict[str, Any], key: dict[str, str], listener: socket.socket, ended: list[int]) -> int:
    """Start the ranks, again after each loss. The exit code: 1 if they never came to serve, or twice in a row."""
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    before = False  # whether they served the last time: what ended one rank may end it once more while it starts
    while True:
        started = time.monotonic()
        served, lost = _round(options, key, listener, ended, url)
        if ended:
            return 0
        if not (served or before):
            echo(f"tpcore serve: {lost} before it could serve", err=True)
            return 1
        echo(f"tpcore serve: {lost}; after {time.monotonic() - started:.0f} s, the ranks start again", err=True)
        before = served


def _round(
    options: dict[str, Any], key: dict[str, str], listener: socket.socket, ended: list[int], url: str
) -> tuple[bool, str]:
    """From the start of the ranks to their end: whether they served, and why they ended."""
    processes, (store, job), (ready, write) = Processes(), host_store(), os.pipe()
    os.set_blocking(ready, False)
    tp, served = options["tp"], False
    echo(f"tpcore serve: starting {counted(tp, 'rank')} of {options['name']}", err=True)
    try:
        for rank in range(tp):
            arguments, fds = (listener.fileno(), write, json.dumps(options)), (listener.fileno(), write)
            processes.start(_RANK, arguments, environment=serving_environment(rank, tp, job) | key, fds=fds)
        while True:
            over = bool(ended) or any(p.poll() is not None for p in processes.all)
            with suppress(BlockingIOError):  # a rank that has just ended may have told before
                if os.read(ready, 1):
                    served = True
                    echo(f"tpcore serve: {options['name']} at {url}, tp={tp}")
            if over:
                break
            time.sleep(_POLL)
        exits = [(rank, p.returncode) for rank, p in enumerate(processes.all) if p.poll() is not None]
        if ended:
            processes.all[0].send_signal(signal.SIGTERM)
        return served, "; ".join(f"rank {rank} {described(code)}" for rank, code in exits)
    finally:
        # ranks that do not serve yet have no requests to answer
        processes.close(_PATIENCE if ended and served else 0 if ended else _GRACE)
        del store
        os.close(ready)
        os.close(write)
