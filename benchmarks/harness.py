"""How contestants are raced: in turns, in the same two processes, each against the floor of its round."""

from __future__ import annotations

import gc
import mmap
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tpcore.runtime import keep_freed_memory

TP = 2


@dataclass(frozen=True)
class Contestant:
    """``run`` is timed. ``before`` is not, and comes before each run: fresh inputs, gradients set to None."""

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


@dataclass
class Race:
    """Seconds of a run by contestant, one entry per round; the slower rank counts."""

    title: str
    inner: int
    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]  # of all threads of the process: what noise from other programs leaves alone


def race(
    title: str,
    contestants: Sequence[Contestant],
    rounds: int,
    inner: int,
    warm: int,
    cpu: Callable[[], float] = time.process_time,
) -> Race:
    """Let all contestants take turns, ``inner`` runs a turn, in another order each round; a turn's time is
    the mean of its runs. (Not their median: a short run waits once or twice for the peer to be woken, or
    does not, so single times fall into two heaps, and a median jumps from one to the other.)

    The order is drawn anew every round (the same on both ranks), so that nobody always follows the same
    neighbour and inherits its caches. A barrier opens each turn of ranks that run in step, and where a turn
    has several runs, so short that cold caches show, one that does not count. Garbage is collected between
    rounds only. ``cpu``: a clock of processor time; this process's, unless the work is done in others.
    """
    for contestant in contestants:
        for _ in range(warm):
            contestant.before()
            contestant.run()
    turns: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contestants}
    draw = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for contestant in draw.sample(contestants, len(contestants)):
                turns[contestant.name].append(_turn(contestant, inner, cpu))
            gc.collect(0)
    finally:
        gc.enable()
    result = Race(title, inner, {}, {})
    for name, pairs in turns.items():
        slower = torch.tensor(pairs, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(slower, dist.ReduceOp.MAX)
        result.seconds[name], result.cpu[name] = slower.T.tolist()
    return result


def _turn(contestant: Contestant, inner: int, cpu: Callable[[], float]) -> tuple[float, float]:
    before, run, clock = contestant.before, contestant.run, time.perf_counter
    if dist.is_initialized():
        dist.barrier()
    if inner > 1:
        before()
        run()
    seconds = busy = 0.0
    for _ in range(inner):
        before()
        busy_before, start = cpu(), clock()
        run()
        seconds += clock() - start
        busy += cpu() - busy_before
    return seconds / inner, busy / inner


def table(result: Race, floor: str, *others: str) -> str:
    """Markdown: median time and processor time, and their ratios to the floor in the same round. ``others``:
    contestants to which each time's ratio is shown too.

    The ratios are medians over the rounds, so a slow moment of the machine, which lasts for a round or
    longer, counts on both sides of the division.
    """
    rounds = len(result.seconds[floor])
    more = "".join(f" of the {name} |" for name in others)
    lines = [
        f"**{result.title}** ({rounds} rounds of {result.inner})",
        "",
        f"| | median | ratio to the {floor} | middle half of the ratios |{more} CPU time | its ratio |",
        "|---|---:|---:|---:|" + "---:|" * len(others) + "---:|---:|",
    ]
    for name, seconds in result.seconds.items():
        low, ratio, high = _quartiles(seconds, result.seconds[floor])
        _, busy_ratio, _ = _quartiles(result.cpu[name], result.cpu[floor])
        wall, busy = (statistics.median(t) * 1e3 for t in (seconds, result.cpu[name]))
        also = "".join(f" {_quartiles(seconds, result.seconds[other])[1]:.3f} |" for other in others)
        lines.append(
            f"| {name} | {wall:.3g} ms | {ratio:.3f} | {low:.3f} to {high:.3f} |{also} {busy:.3g} ms "
            f"| {busy_ratio:.3f} |"
        )
    return "\n".join(lines)


def _quartiles(times: list[float], floor: list[float]) -> list[float]:
    ratios = [t / f for t, f in zip(times, floor, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def check_equal(who: str, what: str, got: Tensor | None, want: Tensor, tolerance: float) -> None:
    """Raise unless ``got`` is ``want``, to ``tolerance`` of the largest value in it."""
    if got is None:
        raise ValueError(f"{who}: no {what}")
    got, want = got.detach(), want.detach()
    if got.shape != want.shape:
        raise ValueError(f"{who}: {what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    error = float((got - want).abs().max() / want.abs().max())
    if not error <= tolerance:
        raise ValueError(f"{who}: {what} is off by {error:.2g} of its largest value, limit {tolerance:.2g}")


def peak_bytes(contestant: Contestant) -> int | None:
    """How far the resident memory of this process grows during one run; None where Linux does not say."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    contestant.before()
    contestant.run()  # whatever is allocated once, is now
    contestant.before()
    gc.collect()
    clear.write_text("5")  # sets the high-water mark to what is resident now
    resident = _status("VmRSS")
    contestant.run()
    return _status("VmHWM") - resident


def grown(since: int) -> int:
    """How far this process's resident memory was, at its highest, above ``since``; Linux only."""
    return _status("VmHWM") - since


def resident() -> int:
    """Of this process alone. Sets the high-water mark to it."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    match = re.search(rf"{key}:\s*(\d+) kB", _read("/proc/self/status"))
    if match is None:
        raise ValueError(f"no {key} in /proc/self/status")
    return int(match[1]) * 1024


def descendants() -> list[int]:
    """Of this process. Linux only, as is all below."""
    out, todo = [], [os.getpid()]
    while todo:
        for file in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            children = [int(pid) for pid in file.read_text().split()]
            out += children
            todo += children
    return out


def cpu_seconds() -> float:
    """Of this process and all below it, in all threads."""
    total = 0
    for pid in (os.getpid(), *descendants()):
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total += int(file.read_text().split()[0])
    return total * 1e-9


def resident_bytes() -> int:
    """Of this process and all below it."""
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (os.getpid(), *descendants()))
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def touch(size: int) -> None:
    """Have memory that is free be there: a machine that is a virtual one may have given it back meanwhile."""
    with mmap.mmap(-1, size) as pages:
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1


def part(full: Tensor, dim: int, rank: int) -> Tensor:
    """This rank's contiguous part of an unsharded tensor."""
    return full.detach().chunk(TP, dim)[rank].contiguous()


def say(text: str = "") -> None:
    """Print on rank 0, and in a process that belongs to no group."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def conditions(world: int = TP) -> str:
    """Where and with what: everything that a figure needs beside it."""
    cpu = re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    packages = ("torch", "tpcore", "fairscale", "megatron-core", "deepspeed")
    return (
        f"{date.today()}, {cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, "
        f"{', '.join(f'{name} {_version(name)}' for name in packages)}; "
        f"{world} processes, {torch.get_num_threads()} thread each, "
        f"TPCORE_CHECK={os.environ['TPCORE_CHECK']}"
    )


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def start(main: Callable[[int, Namespace], None], options: Namespace, world: int = TP) -> None:
    """``main(rank, options)`` in ``world`` processes joined over gloo, one compute thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"  # two ranks, two cores: a second thread would take the peer's
    # left to itself tpcore checks a job's first collectives only; what is timed here is the rest
    os.environ.setdefault("TPCORE_CHECK", "0")
    forked()
    with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
        mp.start_processes(_rank, (main, options, f"{folder}/store", world), world, start_method="forkserver")


def forked() -> Any:
    """The context of processes that a server forks, which has imported torch once for all."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tpcore"])
    return context


def _rank(rank: int, main: Callable[[int, Namespace], None], options: Namespace, store: str, world: int) -> None:
    torch.set_num_threads(1)
    if getattr(options, "keep", False):
        keep_freed_memory()
    # Megatron-core's advice on CUDA streams, given at the first forward
    warnings.filterwarnings("ignore", "When using async grad allreduce", UserWarning)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        main(rank, options)
    finally:
        dist.destroy_process_group()
