"""One work of one contestant of ``benchmarks.cuda_session``, in a process for each rank. The first rank writes its
figures to the file that the variable ``CUDA_SESSION_RESULT`` names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import tpcore

from .transformers_tp import Size

SIZES = {"base": Size(22, 2048, 16, 32000, 4, 2048), "tiny": Size(1, 32, 4, 64, 2, 8)}  # a billion parameters; a test
CURVE = Size(2, 128, 4, 512, 4, 64)
RESULT = "CUDA_SESSION_RESULT"


def timed(run: Callable[[], object], rounds: int, at: torch.device) -> dict[str, Any]:
    cuda = at.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(2):
        run()
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # of how the model was made, in float32, and compiled
    durations = []
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        run()
        wait()
        durations.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return {"seconds": statistics.median(durations), "fastest": min(durations), "slowest": max(durations), "peak": peak}


def joined(options: Namespace) -> torch.device:
    """The device, after ``tpcore.init`` unless the contestant is plain."""
    if options.contestant.startswith("plain"):
        return torch.device("cuda" if options.backend == "cuda" else "cpu")
    return tpcore.init(backend=options.backend, tp=options.tp).device


def llama(size: Size, options: Namespace, at: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with at:
        model: Any = transformers.LlamaForCausalLM(size.config())
    model = model.to(dtype)
    if not options.contestant.startswith("plain"):
        model = tpcore.parallelize(model).to(at)
    return torch.compile(model) if options.contestant.endswith("compiled") else model


def stepping(model: Any, ids: Tensor, options: Namespace) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    step = optimizer.step if options.contestant.startswith("plain") else lambda: tpcore.optimizer_step(optimizer)

    def run() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def batch(size: Size, at: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size.vocab, (size.batch, size.length), generator=generator).to(at)


def curve(options: Namespace) -> dict[str, Any]:
    at = joined(options)
    # made on the CPU, whose random numbers are the same everywhere
    model = llama(CURVE, options, torch.device("cpu"), torch.float32).to(at)
    run = stepping(model, batch(CURVE, at), options)
    return {"losses": [float(run()) for _ in range(20)]}


def reads(options: Namespace) -> dict[str, Any]:
    at = joined(options)
    run = stepping(llama(CURVE, options, at, torch.float32), batch(CURVE, at), options)
    run()
    if at.type != "cuda":  # there is no detector
        return {"reads": None}
    torch.cuda.set_sync_debug_mode("error")
    run()
    torch.cuda.set_sync_debug_mode("default")
    return {"reads": 0}


def step(options: Namespace) -> dict[str, Any]:
    at, size = joined(options), SIZES[options.size]
    run = stepping(llama(size, options, at, torch.bfloat16), batch(size, at), options)
    return {**timed(run, options.rounds, at), "loss": float(run())}


def loss(options: Namespace) -> dict[str, Any]:
    at, size = joined(options), SIZES[options.size]
    logits = torch.randn(size.batch * size.length, 4 * size.vocab // options.tp, device=at, dtype=torch.bfloat16)
    logits.requires_grad_()
    target = torch.arange(len(logits), device=at) % size.vocab
    total: Any = F.cross_entropy
    if options.contestant != "plain":
        total = partial(tpcore.parallel_cross_entropy, vocab_size=4 * size.vocab)
    if options.contestant == "liger":
        total = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy

    def run() -> None:
        total(logits, target).mean().backward()
        logits.grad = None

    return timed(run, options.rounds, at)


def generate(options: Namespace) -> dict[str, Any]:
    at, size = joined(options), SIZES[options.size]
    model = llama(size, options, at, torch.bfloat16).eval()
    new = min(128, size.length // 2)
    # on a GPU transformers then compiles the decode step, and torch captures it as CUDA graphs
    asked: dict[str, Any] = {"cache_implementation": "static"} if options.contestant.endswith("graphs") else {}
    asked |= {"max_new_tokens": new, "min_new_tokens": new}
    prompt = batch(size, at)[:, : size.length // 4]

    def run() -> None:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **asked)

    figures = timed(run, 3, at)
    return {"tokens a second": len(prompt) * new / figures["seconds"], **figures}


WORK = {work.__name__: work for work in (curve, reads, step, loss, generate)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", choices=WORK, required=True)
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--size", default="base", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    figures = WORK[options.work](options)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(figures))
    if tpcore.is_initialized():
        tpcore.shutdown()


if __name__ == "__main__":
    main()
