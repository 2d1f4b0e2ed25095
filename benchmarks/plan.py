"""``tpcore plan`` against this machine: predicted and measured steps and peaks of three models on twelve meshes.

In each round the machine is calibrated, unless ``--machine`` names its file, and then each mesh runs the very lines
that the plan prints; the median of the rounds counts, for what a shared host can do changes by the minute. Each rank
also times a fixed piece of work, the probe, before every step, and so do as many processes around the calibration: the
column "host" is by how much the machine was slower during the steps than when it was calibrated, and the ratio is that
of the predicted time to the measured one divided by it. ``--hosts``: over two hosts as network namespaces, on a wire
with delay and a limited rate. ``--published``: public training runs beside predictions of their configurations alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import tpcore
from tpcore.log import quiet
from tpcore.processes.launch import launch
from tpcore.runtime.memory import keep_freed_memory
from tpcore_plan.choice import Choice, setup_lines, step_lines
from tpcore_plan.machine import Machine
from tpcore_plan.predict import Prediction, predict
from tpcore_plan.reduced import Reduced, Ways

from .calibrate import calibrate
from .harness import conditions, grown, resident, say
from .links import fit
from .plan_hosts import measured, on_hosts
from .plan_published import compare_published
from .probe import Probe, probed

DEVICES = 2
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_* constants of malloc.h


@dataclass(frozen=True)
class Case:
    """A model, the tokens of an example, and the examples of a step."""

    name: str
    config: dict[str, Any]
    seq_len: int
    batch: int

    def write(self, home: Path) -> str:
        """The directory of its ``config.json``."""
        folder = home / self.name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return str(folder)


_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
_MIXTRAL = {
    **_LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
CASES = (
    Case("dense", _LLAMA, 128, 8),
    Case("experts", _MIXTRAL, 128, 8),
    Case("long sequence", {**_LLAMA, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}, 1024, 2),
)


def choices(case: Case) -> list[Choice]:
    """Twelve, of one device and of two."""
    half = case.batch // 2
    alone = Choice(Ways(), microbatch=case.batch)
    data = Choice(Ways(), dp=2, microbatch=half, zero1=True)
    tensor = Choice(Ways(tp=2), microbatch=case.batch)
    tokens = replace(tensor, ways=Ways(tp=2, sequence_parallel=True))
    stages = Choice(Ways(), pp=2)
    context = [replace(tensor, ways=Ways(cp=2, context_parallel=way), zero1=True) for way in ("gather", "ring")]
    meshes = [alone, replace(alone, recompute=True), data, replace(data, recompute=True), tensor, tokens]
    meshes += [replace(stages, microbatch=case.batch // m, microbatches=m) for m in (2, case.batch)]
    if "num_local_experts" in case.config:
        experts = Choice(Ways(ep=2), microbatch=half, zero1=True)
        whole = replace(tensor, ways=Ways(tp=2, expert_parallel=True))
        return [*meshes, experts, replace(experts, recompute=True), whole, replace(tensor, recompute=True)][:12]
    return [*meshes, *context, replace(tokens, recompute=True), replace(tensor, microbatch=half, microbatches=2)]


# -- measured -----------------------------------------------------------------------------------------------
def measure(folder: str, chosen: Choice, seq_len: int, steps: int) -> tuple[float, int, float]:
    """In a rank: the median time of a step, how far the process's memory grew, and the probe's time, of the worse
    rank."""
    torch.set_num_threads(1)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.use_cache = False
    cls = getattr(transformers, config.architectures[0])
    tiny = cls(type(config)(**{**config.to_dict(), "vocab_size": 64, "num_hidden_layers": 1}))
    tiny(input_ids=torch.zeros(1, 8, dtype=torch.int64), labels=torch.zeros(1, 8, dtype=torch.int64)).loss.backward()
    del tiny  # what it has loaded stays, and counts for no step
    first, *others = setup_lines(chosen, "float32")
    names: dict[str, Any] = {"torch": torch, "tpcore": tpcore, "lr": 1e-4}
    exec(first, names)
    _give_back()
    before = resident()
    names["model"] = cls(config)
    with quiet():
        exec("\n".join(others), names)
    rows = chosen.microbatch * chosen.microbatches
    ids = torch.randint(config.vocab_size, (rows, seq_len), generator=torch.Generator().manual_seed(0))
    names["batch"] = {"input_ids": ids, "labels": ids}
    program = compile("\n".join(step_lines(chosen)), "step", "exec")
    for _ in range(2):  # the second has the optimizer's state
        exec(program, names)
    most = grown(before)
    keep_freed_memory()
    world, one, seconds, probe = tpcore.current().world, torch.ones(1), [], Probe()
    probe.run(3)
    probe.seconds.clear()
    for _ in range(steps + 1):
        probe.run(3)
        world.all_reduce(one)
        start = time.perf_counter()
        exec(program, names)
        seconds.append(float(world.all_reduce(torch.tensor([time.perf_counter() - start]), "max")))
    worst = torch.tensor([float(most), statistics.median(probe.seconds)], dtype=torch.float64)
    peak, slow = world.all_reduce(worst, "max").tolist()
    tpcore.shutdown()
    return statistics.median(seconds[1:]), int(peak), slow


def _give_back() -> None:
    """glibc returns freed memory at once, so that what a process has is what its tensors hold. Ranks of
    ``tpcore.launch`` keep theirs, which makes a step faster and leaves gaps between tensors of other sizes."""
    gc.collect()
    libc = ctypes.CDLL(None)
    for threshold in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        libc.mallopt(threshold, 1 << 20)
    libc.malloc_trim(0)


# -- the two beside each other ------------------------------------------------------------------------------
def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau of two rankings: pairs in the same order less pairs in another, over all pairs."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    same = sum(1 if (a[i] - a[j]) * (b[i] - b[j]) > 0 else -1 for i, j in pairs)
    return same / len(pairs)


@dataclass(frozen=True)
class Compared:
    """Of one mesh: what is predicted, and what is measured in each round. ``slower``: than at the calibration."""

    expected: list[Prediction]
    seconds: list[float]
    peaks: list[int]
    slower: list[float]

    @property
    def predicted(self) -> float:
        return statistics.median(p.step for p in self.expected)

    @property
    def measured(self) -> float:
        """At the speed of the calibration."""
        return statistics.median(took / slower for took, slower in zip(self.seconds, self.slower, strict=True))

    @property
    def off(self) -> float:
        """MiB that the peak is off."""
        return abs(self.expected[0].nbytes - max(self.peaks)) / 2**20

    def line(self) -> str:
        peaks = f"{self.expected[0].nbytes / 2**20:,.0f} MiB | {max(self.peaks) / 2**20:,.0f} MiB"
        raw, host = statistics.median(self.seconds), statistics.median(self.slower)
        times = f"{self.predicted:.3f} s | {raw:.3f} s | {host:.2f} | {self.predicted / self.measured:.2f}"
        return f"| {self.expected[0].choice} | {times} | {peaks} |"


def compare(machine: Machine | None, cases: Sequence[Case], options: argparse.Namespace) -> None:
    errors: list[float] = []
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as home:
        for case in cases:
            rows = _compared(machine, case, case.write(Path(home)), options)
            tau = kendall([row.predicted for row in rows], [row.measured for row in rows]) if len(rows) > 1 else 1.0
            errors += [abs(row.predicted / row.measured - 1) for row in rows]
            memory += [row.off for row in rows]
            error = statistics.median(errors[-len(rows) :])
            summary = f"Kendall's tau of the steps {tau:.2f}, median error {error:.0%}"
            say(f"\n**{case.name}**, {case.batch} x {case.seq_len} tokens: {summary}\n")
            say("| mesh | predicted step | measured | host | ratio | predicted peak | measured |")
            say("|---|---:|---:|---:|---:|---:|---:|")
            for row in rows:
                say(row.line())
    say(f"\nerror of the step: median {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    say(f"difference of the peak: median {statistics.median(memory):.0f} MiB, largest {max(memory):.0f} MiB")


def _compared(machine: Machine | None, case: Case, folder: str, options: argparse.Namespace) -> list[Compared]:
    model = Reduced(folder, case.seq_len, torch.float32)
    picked = [c for c in choices(case) if c.mesh.size == DEVICES or not options.hosts][: options.meshes]
    rows = [Compared([], [], [], []) for _ in picked]
    for _ in range(options.rounds):
        before = _probes(options.steps)
        now = _machine(options) if machine is None else machine
        calm = {n: (before[n] + after) / 2 for n, after in _probes(options.steps).items()}
        for chosen, row in zip(picked, rows, strict=True):
            row.expected.append(predict(model, chosen, now))
            job = (folder, chosen, case.seq_len, options.steps)
            if options.hosts:
                took, peak, probe = _over_hosts(job, options)
            else:
                took, peak, probe = launch(measure, chosen.mesh.size, args=job)[0]
            row.seconds.append(took)
            row.peaks.append(peak)
            row.slower.append(probe / calm[chosen.mesh.size])
    return rows


def _probes(steps: int) -> dict[int, float]:
    """The probe's time in one process, and in as many as there are devices."""
    return {n: max(launch(probed, n, args=(steps,))) for n in (1, DEVICES)}


def _machine(options: argparse.Namespace) -> Machine:
    """This one, calibrated; with hosts, each device on one of its own."""
    machine = calibrate(devices=DEVICES)
    if not options.hosts:
        return machine
    link, _ = fit(measured(options.delay / 1e3, options.rate * 1e6, 1, 1.0))
    return replace(machine, per_host=1, hosts=DEVICES, between=link)


def _over_hosts(job: tuple[Any, ...], options: argparse.Namespace) -> tuple[float, int, float]:
    with tempfile.TemporaryDirectory() as home:
        wire = {"delay": options.delay / 1e3, "rate": options.rate * 1e6}
        on_hosts("benchmarks.plan:host_rank", (home, *job), per_host=1, **wire)
        took, peak, probe = json.loads(Path(home, "rows").read_text())
    return took, peak, probe


def host_rank(home: str, *job: Any) -> None:
    """A rank of a job over hosts, which writes what ``measure`` finds to ``home``."""
    rows, rank = measure(*job), int(os.environ["RANK"])
    if rank == 0:
        Path(home, "rows").write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", type=Path, help="the file of `python -m benchmarks.calibrate --devices 2`")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="one of the models")
    parser.add_argument("--steps", type=int, default=3, help="measured after one that does not count")
    parser.add_argument("--rounds", type=int, default=2, help="of calibration and all meshes")
    parser.add_argument("--meshes", type=int, default=12, help="of each model, the first so many")
    parser.add_argument("--hosts", action="store_true", help="a device each of two hosts; needs root")
    parser.add_argument("--delay", type=float, default=0.5, help="of the wire between hosts: milliseconds one way")
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit that a host sends in a second")
    parser.add_argument("--small", action="store_true", help="tiny models: shows that it runs, and no figures")
    parser.add_argument("--published", action="store_true", help="public runs instead of this machine")
    options = parser.parse_args()
    if options.published:
        return compare_published()
    os.environ.setdefault("TPCORE_CHECK", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = None if options.machine is None else Machine.read(options.machine)
    cases = [case for case in CASES if options.case in (None, case.name)]
    if options.small:
        cases = [replace(c, config={**c.config, "num_hidden_layers": 2, "vocab_size": 512}, seq_len=32) for c in cases]
    torch.set_num_threads(1)
    say(f"{conditions(DEVICES)}")
    compare(machine, cases, options)


if __name__ == "__main__":
    main()
