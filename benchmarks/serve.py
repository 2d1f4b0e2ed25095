"""A traced encoder at tp=2, called from one Python process: what a call costs.

Every contestant computes the same thing from the same weights, and the outputs are compared first.

    floor                  two processes that were started beforehand, with the ids and the output in shared
                           memory; plain torch layers of half the width, and sums over shared memory by hand
    tpcore                 the model that parallel_model_load returns
    tpcore over gloo       the same, with TPCORE_SHM=0
    tpcore's layers        run eagerly by processes as the floor's
    torch, DeepSpeed       their parallel layers (parallelize_module, init_inference), run as the floor's are
    one process            the same encoder of plain torch layers in the parent itself, with one thread
    one process, 2 threads the same in a process of its own, with as many threads as there are ranks

``benchmarks/workers.py`` has the encoder and its engines. CPU time is that of the parent and of all processes
below it.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpcore.settings import changed
from tpcore.trace import parallel_model_load, parallel_model_save, parallel_model_trace

from . import workers
from .harness import TP, Contestant, check_equal, conditions, cpu_seconds, race, resident_bytes, table
from .workers import Encoder, Engine, Size, Workers

TOLERANCE = 1e-5
"""Of the largest value: float32 sums of up to 4096 terms, added in another order."""
SIZES = {
    "large": Size(24, 1024, 16, 30522, 1, 128, rounds=30, inner=1, calls=100),
    "large16": Size(24, 1024, 16, 30522, 1, 16, rounds=30, inner=1, calls=100),
    "base": Size(12, 768, 12, 30522, 1, 128, rounds=60, inner=1, calls=1000),
    "small": Size(4, 128, 2, 2048, 1, 32, rounds=200, inner=10, calls=1000),
    "tiny": Size(1, 32, 2, 64, 1, 8, rounds=2, inner=1, calls=20),  # for the tests
}


# -- what is measured -----------------------------------------------------------------------------------
def traced(size: Size, ids: Tensor, folder: Path) -> Path:
    started = time.perf_counter()
    model = parallel_model_trace(lambda: Encoder(size, TP).eval(), ids, tp_degree=TP)
    parallel_model_save(model, folder / "traced")
    model.close()
    print(f"traced and saved in {time.perf_counter() - started:.1f} s")
    return folder / "traced"


def start_up(artifact: Path, ids: Tensor, times: int) -> None:
    """From the call of parallel_model_load until the first output is there."""
    loads, firsts = [], []
    for _ in range(times):
        started = time.perf_counter()
        with parallel_model_load(artifact) as model:
            loads.append(time.perf_counter() - started)
            model(ids)
            firsts.append(time.perf_counter() - started)
    print(
        f"parallel_model_load: median {statistics.median(loads):.2f} s of {times}; until the first output "
        f"{statistics.median(firsts):.2f} s\n"
    )


def above_forward(models: dict[str, Any], ids: Tensor, turns: int) -> None:
    """How much longer a call takes than the forward of the rank that was slower in it; and how long the sum
    of its output takes, which tells whether that is at hand. In turns of ten calls, of which the first finds
    its ranks asleep and is not counted."""
    extra: dict[str, list[float]] = {name: [] for name in models}
    looks: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(turns):
        for name, model in models.items():
            for call in range(10):
                started = time.perf_counter()
                out = model(ids)
                returned = time.perf_counter()
                out.sum()
                looked = time.perf_counter()
                if call:
                    extra[name].append(returned - started - max(model.rank_seconds))
                    looks[name].append(looked - returned)
    print()
    for name, seconds in extra.items():
        low, middle, high = (s * 1e6 for s in statistics.quantiles(seconds, n=4))
        print(
            f"{name}: a call takes {middle:.0f} microseconds more than the slower rank's own forward "
            f"(median of {len(seconds)}; middle half {low:.0f} to {high:.0f}); the sum of its output "
            f"{statistics.median(looks[name]) * 1e6:.0f}"
        )


def sleeps(models: dict[str, Any], ids: Tensor, calls: int) -> None:
    """How often each process of a model waits asleep in a call: one wait is for the call itself."""
    for name, (model, processes) in models.items():
        before = [_switches(p.pid) for p in processes]
        for _ in range(calls):
            model(ids)
        each = [(_switches(p.pid) - n) / calls for p, n in zip(processes, before, strict=True)]
        print(f"{name}: waits asleep in a call: {', '.join(f'{n:.1f}' for n in each)} of the ranks")


def _switches(pid: int) -> int:
    match = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(match[1]) if match else 0


def endurance(model: Any, ids: Tensor, calls: int) -> None:
    """Many calls in a row: the time of the first and of the last tenth, and the memory before and after."""
    tenth = calls // 10
    seconds: list[float] = []
    for _ in range(tenth):
        model(ids)
    gc.collect()
    before = resident_bytes()
    for _ in range(calls):
        started = time.perf_counter()
        model(ids)
        seconds.append(time.perf_counter() - started)
    gc.collect()
    grown = resident_bytes() - before
    first, last = statistics.median(seconds[:tenth]), statistics.median(seconds[-tenth:])
    print(
        f"\n{calls} calls in a row: the first {tenth} take {first * 1e3:.3g} ms, the last {tenth} "
        f"{last * 1e3:.3g} ms (medians), ratio {last / first:.3f}; memory of all processes: "
        f"{before / 1e6:.0f} MB, {grown / 1e6:+.2f} MB"
    )


def engines(size: Size, folder: Path, stack: ExitStack, without: list[str]) -> Iterator[tuple[str, Workers]]:
    """Each begun; what misses a package is named and left out."""
    known: dict[str, tuple[Engine, int]] = {
        "floor": (workers.by_hand, TP),
        "tpcore's layers": (workers.layers, TP),
        "torch parallelize_module": (workers.dtensor, TP),
        "DeepSpeed init_inference": (workers.deepspeed, TP),
        f"one process, {TP} threads": (workers.whole, 1),
    }
    for name, (engine, world) in known.items():
        if name in without:
            continue
        try:
            served = Workers(size, str(folder), engine, world)
        except ImportError as e:
            print(f"- left out: {name} ({e})")
            continue
        stack.callback(served.close)
        yield name, served


def run(size: Size, options: argparse.Namespace, folder: Path) -> None:
    ids = torch.randint(size.vocab, (size.batch, size.sequence), generator=torch.Generator().manual_seed(0))
    whole = Encoder(size, 0).eval()
    with torch.inference_mode():
        want = whole(ids)
    artifact = traced(size, ids, folder)
    start_up(artifact, ids, options.loads)
    with ExitStack() as stack:
        runs: dict[str, Any] = dict(engines(size, folder, stack, options.without))
        runs["tpcore"] = model = stack.enter_context(parallel_model_load(artifact))
        if "tpcore over gloo" not in options.without:
            with changed({"TPCORE_SHM": "0"}):
                runs["tpcore over gloo"] = stack.enter_context(parallel_model_load(artifact))
        if "one process" not in options.without:
            runs["one process"] = torch.inference_mode()(whole)
        for name, call in runs.items():
            check_equal(name, "output", call(ids), want, TOLERANCE)
        print(f"{size}: the outputs of all {len(runs)} equal those of the unsharded encoder\n")
        contestants = [Contestant(name, partial(call, ids)) for name, call in runs.items()]
        rounds = options.rounds or size.rounds
        title = f"one call, {size}"
        print(table(race(title, contestants, rounds, size.inner, options.warm, cpu_seconds), "floor"))
        above_forward({"floor": runs["floor"], "tpcore": model}, ids, max(1, rounds // 3))
        both = {"floor": (runs["floor"], runs["floor"].processes), "tpcore": (model, model._workers._processes.all)}
        sleeps(both, ids, max(1, rounds // 3))
        endurance(model, ids, options.calls or size.calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["base", "small"])
    parser.add_argument("--shapes", nargs="+", default=[], help="instead of the size's own: 1x16 8x512, batch x tokens")
    parser.add_argument("--without", nargs="+", default=[], help="contestants to leave out, as tables name them")
    parser.add_argument("--rounds", type=int, help="default: 30 of BERT-large, 60 of base, 200 of small")
    parser.add_argument("--warm", type=int, default=5, help="calls before the first round")
    parser.add_argument("--loads", type=int, default=5, help="how often to start the model")
    parser.add_argument("--calls", type=int, help="in a row; default: 1000")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TPCORE_CHECK", "0")  # the floor's layers; a traced model has no checks to leave out
    torch.set_num_threads(1)
    print(conditions() + "\n")
    sizes = [SIZES[name] for name in options.size]
    if options.shapes:
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
        sizes = [replace(size, batch=batch, sequence=tokens) for size in sizes for batch, tokens in shapes]
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
            run(size, options, Path(folder))


if __name__ == "__main__":
    main()
