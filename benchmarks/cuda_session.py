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
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch
import transformers

from .cuda_work import RESULT, SIZES, WORK
from .harness import conditions

APART = 1e-4
"""Of a loss, relative: float32 sums in another order, which twenty steps carry on."""
LEAVE = 20.0
"""Seconds in which a stage that is late ends: half of them for its launcher, to end its ranks."""
ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
"""For NCCL 2.30: kernels of both ranks have to run at once."""
TIMED = ("step", "loss", "generate")


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
    planned: list[Stage] = [("doctor", [*tool, "doctor"], {}, 60.0)]

    def add(work: str, *contestants: str, tp: int = 1, limit: float = 60.0, how: str = "") -> None:
        backend = "cpu_gloo" if "CPU" in how else options.backend
        rounds = options.rounds if tp == 1 else min(3, options.rounds)  # gloo carries gigabytes through the host
        arguments = f"--work {work} --tp {tp} --backend {backend} --size {options.size} --rounds {rounds}".split()
        # one rank needs no launcher, which takes seconds to start
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={tp}", "-m"] if tp > 1 else []
        for who in contestants:
            command = [sys.executable, "-m", *launcher, "benchmarks.cuda_work", *arguments, "--contestant", who]
            planned.append((f"{work}, {who}, tp={tp}{how}", command, variables(tp, how), limit))

    def variables(tp: int, how: str) -> Variables:
        return {} if tp == 1 else ON_ONE_GPU if how == over else shared

    def verify(tp: int, how: str = "") -> None:
        table = str(options.out.with_suffix(f".tp{tp}{'.nccl' if how else ''}.json"))
        command = [*tool, "verify", "--backend", options.backend, "--tp", str(tp), "--save", table]
        planned.append((f"verify, tp={tp}{how}", command, variables(tp, how), 120.0))

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
    return [stage for stage in planned if kind(stage) in options.stages]


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
    sys.exit(not session(parser.parse_args()))


if __name__ == "__main__":
    main()
