"""All figures of the cuda backend, in one command of at most nine minutes.

    python -m benchmarks.cuda_session --out session.json

Each stage has processes of its own and a limit of its own; one that fails or is late is written down as that, and the
others go on. What is not timed runs first, as many stages at once as half of the cores. The file holds every stage
whenever the session ends; none of their processes outlives it.

    doctor    what `tpcore doctor` says
    verify    `tpcore verify` at tp=1, and at tp=2 (over NCCL on two GPUs; with both ranks on one over gloo, and over
              NCCL too from 2.30 on)
    curve     losses of a small Llama in float32, on the CPU and on the GPU at tp=1 and 2: 1e-4 apart at most
    reads     a step under torch's own detector of synchronizations, set to raise
    step      a training step of a Llama with a billion parameters in bfloat16: seconds (median, fastest and slowest of
              the rounds: what differs less than these is noise), and a rank's peak of memory in them
    loss      forward and backward of the loss alone, beside F.cross_entropy and Liger's, where that is installed
    generate  tokens a second, by transformers' `generate`

Contestants: `plain` is transformers alone, `tpcore` the same model after `tpcore.parallelize`, `... compiled` after
torch.compile too, `tpcore graphs` with a static cache, whose decode step is captured. At tp=1 tpcore ought to cost
nothing. tp=2 on one GPU is twice the work for one device, so it shows costs. `--backend cpu_gloo --size tiny`: no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import tpcore

from .harness import conditions
from .transformers_tp import Size

SIZES = {"base": Size(22, 2048, 16, 32000, 4, 2048), "tiny": Size(1, 32, 4, 64, 2, 8)}  # a billion parameters; a test
CURVE = Size(2, 128, 4, 512, 4, 64)
APART = 1e-4
"""Of a loss, relative: float32 sums in another order, which twenty steps carry on."""
LEAVE = 20.0
"""Seconds in which a stage that is late ends: half of them for its launcher, to end its ranks."""
RESULT = "CUDA_SESSION_RESULT"
ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
"""For NCCL 2.30: kernels of both ranks have to run at once."""
TIMED = ("step", "loss", "generate")


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
    total: Any = F.cross_entropy if options.contestant == "plain" else tpcore.parallel_cross_entropy
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
STAGES = ("doctor", *WORK, "verify")
Variables = dict[str, str]
Stage = tuple[str, list[str], Variables, float]
"""Name, command, variables, seconds at most."""


def stages(options: Namespace) -> list[Stage]:
    """Those that are timed in the order of what is worth most."""
    gpus = torch.cuda.device_count() if options.backend == "cuda" else 0
    # two ranks on one GPU: NCCL refuses them
    shared = {"TPCORE_CUDA_TRANSPORT": "gloo"} if gpus == 1 else {}
    over = ", over NCCL on one GPU" if gpus == 1 and torch.cuda.nccl.version() >= (2, 30) else None
    tool = [sys.executable, "-m", "tpcore"]
    stages: list[Stage] = [("doctor", [*tool, "doctor"], {}, 60.0)]

    def add(work: str, *contestants: str, tp: int = 1, limit: float = 60.0, how: str = "") -> None:
        backend = "cpu_gloo" if "CPU" in how else options.backend
        rounds = options.rounds if tp == 1 else min(3, options.rounds)  # gloo carries gigabytes through the host
        arguments = f"--work {work} --tp {tp} --backend {backend} --size {options.size} --rounds {rounds}".split()
        # one rank needs no launcher, which takes seconds to start
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={tp}", "-m"] if tp > 1 else []
        for who in contestants:
            command = [sys.executable, "-m", *launcher, "benchmarks.cuda_session", *arguments, "--contestant", who]
            stages.append((f"{work}, {who}, tp={tp}{how}", command, variables(tp, how), limit))

    def variables(tp: int, how: str) -> Variables:
        return {} if tp == 1 else ON_ONE_GPU if how == over else shared

    def verify(tp: int, how: str = "") -> None:
        table = str(options.out.with_suffix(f".tp{tp}{'.nccl' if how else ''}.json"))
        command = [*tool, "verify", "--backend", options.backend, "--tp", str(tp), "--json", table]
        stages.append((f"verify, tp={tp}{how}", command, variables(tp, how), 120.0))

    verify(1)
    verify(2)
    add("curve", "tpcore", how=", on the CPU")
    add("curve", "tpcore")
    add("curve", "tpcore", tp=2)
    add("reads", "plain", "tpcore")
    if over is not None:
        add("curve", "tpcore", tp=2, how=over)
        verify(2, over)
    add("step", "plain", "tpcore", limit=90.0)
    add("loss", "plain", "tpcore", "liger")
    add("generate", "plain", "tpcore")
    add("step", "tpcore", tp=2, limit=90.0)
    add("step", "plain compiled", "tpcore compiled", limit=120.0)
    add("generate", "tpcore graphs", limit=120.0)
    return [stage for stage in stages if kind(stage) in options.stages]


def kind(stage: Stage) -> str:
    return stage[0].partition(",")[0]


def outcome(command: list[str], variables: Variables, limit: float) -> dict[str, Any]:
    """What a stage finds in ``limit`` seconds. ``LEAVE`` seconds later at most, none of its processes runs."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        env = {**os.environ, "TPCORE_CHECK": "0", **variables, RESULT: str(result)}
        with subprocess.Popen(command, env=env, stdout=PIPE, stderr=PIPE, text=True) as job:
            try:
                printed, errors = job.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                job.terminate()  # launchers end their ranks at SIGTERM
                with suppress(subprocess.TimeoutExpired):
                    job.communicate(timeout=LEAVE / 2)
                return {"error": f"not done after {limit:.0f} s"}
            finally:
                kill(f"{RESULT}={result}".encode())
        figures: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    if job.returncode:
        figures["error"] = (errors or printed)[-2000:]
    figures = figures or {"printed": printed[-4000:]}
    return {**figures, "took": round(time.monotonic() - began, 1)}


def kill(variable: bytes) -> None:
    """Kill every process with ``variable`` in its environment. torchrun's ranks have sessions of their own and outlive
    a launcher that is killed: they would run beside what is measured next."""
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if variable in place.read_bytes().split(b"\0"):
                os.kill(int(place.parent.name), signal.SIGKILL)


def session(options: Namespace) -> bool:
    until, planned = time.monotonic() + options.limit, stages(options)
    figures: dict[str, dict[str, Any]] = {name: {"error": "no time was left"} for name, *_ in planned}
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "no GPU"
    os.environ.setdefault("TPCORE_CHECK", "0")
    versions = f"transformers {transformers.__version__}, CUDA {torch.version.cuda}, {gpus}"
    written = {"where": f"{conditions(1)}; {versions}", "figures": figures}
    options.out.write_text(json.dumps(written, indent=1))

    def run(stage: Stage) -> None:
        name, command, variables, limit = stage
        left = until - time.monotonic() - LEAVE
        if left > LEAVE / 2:
            figures[name] = outcome(command, variables, min(limit, left))
        print(f"{name}: {in_a_line(figures[name])}", flush=True)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for _ in pool.map(run, [stage for stage in planned if kind(stage) not in TIMED]):
            options.out.write_text(json.dumps(written, indent=1))
    for stage in planned:
        if kind(stage) in TIMED:
            run(stage)
            options.out.write_text(json.dumps(written, indent=1))
    curves = [figures_of["losses"] for figures_of in figures.values() if "losses" in figures_of]
    pairs = [pair for other in curves[1:] for pair in zip(curves[0], other, strict=True)]
    apart = max((abs(a / b - 1) for a, b in pairs), default=0.0)
    expected = sum(name.startswith("curve") for name in figures)
    print(f"{len(curves)} of {expected} curves, at most {apart:.1e} apart; everything is in {options.out}")
    return len(curves) == expected and apart <= APART


def in_a_line(figures: dict[str, Any]) -> str:
    if "error" in figures:
        lines = figures["error"].strip().splitlines()
        return next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else "failed")
    return ", ".join(f"{key} {value:.6g}" for key, value in figures.items() if isinstance(value, int | float))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--size", default="base", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for all stages")
    parser.add_argument("--out", type=Path, default=Path("cuda-session.json"))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--tp", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is None:
        sys.exit(not session(options))
    figures = WORK[options.work](options)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(figures))
    if tpcore.is_initialized():
        tpcore.shutdown()


if __name__ == "__main__":
    main()
