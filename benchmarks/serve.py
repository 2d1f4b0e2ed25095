"""A traced encoder at tp=2, called from one Python process: what a call costs.

Every contestant computes the same thing from the same weights, and the outputs are compared first.

    floor        two processes that were started beforehand, with the ids and the output in shared memory. The
                 parent releases one semaphore for each, both run the bare tpcore layers eagerly, and the
                 parent has waited for one semaphore of each. Nothing is checked, and no error could be told.
    tpcore       the model that parallel_model_load returns
    one process  the same encoder of plain torch layers in the parent itself, with one thread

CPU time is that of the parent and of all processes below it.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore.trace import parallel_model_load, parallel_model_save, parallel_model_trace

from .harness import TP, Contestant, check_equal, conditions, cpu_seconds, race, resident_bytes, table

TOLERANCE = 1e-5
"""Of the largest value: float32 sums of up to 3072 terms, added in another order."""


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    vocab: int
    batch: int
    sequence: int
    rounds: int
    inner: int
    calls: int  # in a row, for decay

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, batch {self.batch} x {self.sequence}"


SIZES = {
    "base": Size(12, 768, 12, 30522, 1, 128, rounds=60, inner=1, calls=1000),
    "small": Size(4, 128, 2, 2048, 1, 32, rounds=200, inner=10, calls=1000),
    "tiny": Size(1, 32, 2, 64, 1, 8, rounds=2, inner=1, calls=20),  # for the tests
}


class Layer(nn.Module):
    """BERT's: attention, then the MLP, each added to what came in and normalised after."""

    def __init__(self, size: Size, tp: int) -> None:
        super().__init__()
        self.heads, hidden = size.heads // max(tp, 1), size.hidden
        self.query, self.key, self.value = (column(tp, hidden, hidden) for _ in range(3))
        self.attended = row(tp, hidden, hidden)
        self.up, self.down = column(tp, hidden, 4 * hidden), row(tp, 4 * hidden, hidden)
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        heads = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.first(x + self.attended(heads))
        out: Tensor = self.second(x + self.down(F.gelu(self.up(x))))
        return out


class Encoder(nn.Module):
    """With ``tp`` 0 of torch's own layers, else this rank's part of the same with the same values."""

    def __init__(self, size: Size, tp: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding = tpcore.ParallelEmbedding if tp else nn.Embedding
        self.words = embedding(size.vocab, size.hidden)
        self.places = nn.Embedding(size.sequence, size.hidden)
        self.norm = nn.LayerNorm(size.hidden)
        self.layers = nn.ModuleList(Layer(size, tp) for _ in range(size.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.norm(self.words(ids) + self.places.weight)
        for layer in self.layers:
            x = layer(x)
        return x


def column(tp: int, inputs: int, outputs: int) -> nn.Module:
    if tp:
        return tpcore.ColumnParallelLinear(inputs, outputs, gather_output=False)
    return nn.Linear(inputs, outputs)


def row(tp: int, inputs: int, outputs: int) -> nn.Module:
    if tp:
        return tpcore.RowParallelLinear(inputs, outputs, input_is_parallel=True)
    return nn.Linear(inputs, outputs)


# -- the floor ------------------------------------------------------------------------------------------
class Floor:
    """``floor(ids)`` as a hand would write it, for one shape and one caller."""

    def __init__(self, size: Size, folder: str) -> None:
        context = mp.get_context("spawn")
        self.ids = torch.zeros(size.batch, size.sequence, dtype=torch.long).share_memory_()
        self.out = torch.zeros(size.batch, size.sequence, size.hidden).share_memory_()
        self.rank_seconds = context.RawArray("d", TP)  # of the last call, as the traced model has them
        self.go = [context.Semaphore(0) for _ in range(TP)]
        self.done = [context.Semaphore(0) for _ in range(TP)]
        self.processes = [
            context.Process(
                target=_floor_rank,
                args=(rank, size, f"{folder}/store", self.ids, self.out, self.rank_seconds, go, done),
                daemon=True,
            )
            for rank, (go, done) in enumerate(zip(self.go, self.done, strict=True))
        ]
        for process in self.processes:
            process.start()
        for semaphore in self.done:
            semaphore.acquire()  # built

    def __call__(self, ids: Tensor) -> Tensor:
        self.ids.copy_(ids)
        for semaphore in self.go:
            semaphore.release()
        for semaphore in self.done:
            semaphore.acquire()
        out: Tensor = self.out.clone()
        return out

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def _floor_rank(
    rank: int, size: Size, store: str, ids: Tensor, out: Tensor, seconds: Any, go: Any, done: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, TP), rank=rank, world_size=TP)
    tpcore.init(backend="cpu_gloo", tp=TP)
    encoder = Encoder(size, TP).eval()
    done.release()
    with torch.inference_mode():
        while True:
            go.acquire()
            started = time.perf_counter()
            y = encoder(ids)
            seconds[rank] = time.perf_counter() - started
            if rank == 0:
                out.copy_(y)
            done.release()


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
    for name, found in extra.items():
        low, middle, high = (s * 1e6 for s in statistics.quantiles(found, n=4))
        print(
            f"{name}: a call takes {middle:.0f} microseconds more than the slower rank's own forward "
            f"(median of {len(found)}; middle half {low:.0f} to {high:.0f}); the sum of its output "
            f"{statistics.median(looks[name]) * 1e6:.0f}"
        )


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


def run(size: Size, options: argparse.Namespace, folder: Path) -> None:
    ids = torch.randint(size.vocab, (size.batch, size.sequence), generator=torch.Generator().manual_seed(0))
    whole = Encoder(size, 0).eval()
    with torch.inference_mode():
        want = whole(ids)
    artifact = traced(size, ids, folder)
    start_up(artifact, ids, options.loads)
    with parallel_model_load(artifact) as model:
        floor = Floor(size, str(folder))
        runs: dict[str, Callable[[Tensor], Tensor]] = {
            "floor": floor,
            "tpcore": model,
            "one process": torch.inference_mode()(whole),
        }
        for name, call in runs.items():
            check_equal(name, "output", call(ids), want, TOLERANCE)
        print(f"{size}: the outputs of all {len(runs)} equal those of the unsharded encoder\n")
        contestants = [Contestant(name, partial(call, ids)) for name, call in runs.items()]
        rounds = options.rounds or size.rounds
        title = f"one call, {size}"
        print(table(race(title, contestants, rounds, size.inner, options.warm, cpu_seconds), "floor"))
        above_forward({"floor": floor, "tpcore": model}, ids, max(1, rounds // 3))
        floor.close()
        endurance(model, ids, options.calls or size.calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["base", "small"])
    parser.add_argument("--rounds", type=int, help="default: 60 of the base size, 200 of the small one")
    parser.add_argument("--warm", type=int, default=5, help="calls before the first round")
    parser.add_argument("--loads", type=int, default=5, help="how often to start the model")
    parser.add_argument("--calls", type=int, help="in a row; default: 1000")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(
        "TPCORE_CHECK", "0"
    )  # the floor's layers; a traced model has no checks to leave out
    torch.set_num_threads(1)
    print(conditions() + "\n")
    for name in options.size:
        with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
            run(SIZES[name], options, Path(folder))


if __name__ == "__main__":
    main()
