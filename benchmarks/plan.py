"""``tpcore plan`` against this machine: predicted and measured steps and peaks of three models on twelve meshes.

The machine is calibrated first, unless ``--machine`` names its file. Each mesh then runs the very lines that the plan
prints. ``--published``: public training runs beside what is predicted from their configurations alone.
"""

from __future__ import annotations

import argparse
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
from tpcore.diagnose.plan.calibrate import calibrate
from tpcore.diagnose.plan.choice import Choice
from tpcore.diagnose.plan.machine import Machine
from tpcore.diagnose.plan.predict import Prediction, predict
from tpcore.diagnose.plan.published import find
from tpcore.diagnose.plan.reduced import Reduced, Ways
from tpcore.diagnose.plan.script import setup_lines, step_lines
from tpcore.log import quiet
from tpcore.processes.launch import launch

from .harness import conditions, grown, resident, say
from .plan_published import RUNS

DEVICES = 2
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""glibc gives freed memory back at once, so that what a process has is what its tensors hold."""


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
    """Twelve of two devices."""
    half = case.batch // 2
    data = Choice(Ways(), dp=2, microbatch=half, zero1=True)
    tensor = Choice(Ways(tp=2), microbatch=case.batch)
    tokens = replace(tensor, ways=Ways(tp=2, sequence_parallel=True))
    stages = Choice(Ways(), pp=2)
    found = [data, replace(data, zero1=False), replace(data, recompute=True), tensor, tokens]
    found += [replace(tokens, recompute=True)]
    found += [replace(stages, microbatch=case.batch // m, microbatches=m) for m in (2, 4, 8) if m <= case.batch]
    if case.batch >= 8:
        found += [
            replace(data, microbatch=half // 2, microbatches=2),
            replace(tensor, microbatch=half, microbatches=2),
        ]
    if "num_local_experts" in case.config:
        experts = Choice(Ways(ep=2), microbatch=half, zero1=True)
        whole = replace(tensor, ways=Ways(tp=2, expert_parallel=True))
        found += [experts, replace(experts, recompute=True), whole]
    cp = [replace(tensor, ways=Ways(cp=2, context_parallel=way), zero1=True) for way in ("gather", "ulysses", "ring")]
    found += [*cp, *(replace(c, recompute=True) for c in cp), replace(tensor, recompute=True)]
    return found[:12]


# -- measured -----------------------------------------------------------------------------------------------
def measure(folder: str, chosen: Choice, seq_len: int, steps: int) -> tuple[float, int]:
    """In a rank: the median time of a step, and how far the process's memory grew."""
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
    gc.collect()
    before = resident()
    names["model"] = cls(config)
    with quiet():
        exec("\n".join(others), names)
    rows = chosen.microbatch * chosen.microbatches
    ids = torch.randint(config.vocab_size, (rows, seq_len), generator=torch.Generator().manual_seed(0))
    names["batch"] = {"input_ids": ids, "labels": ids}
    program = compile("\n".join(step_lines(chosen)), "step", "exec")
    world, one, seconds = tpcore.current().world, torch.ones(1), []
    for _ in range(steps + 1):
        world.all_reduce(one)
        start = time.perf_counter()
        exec(program, names)
        seconds.append(float(world.all_reduce(torch.tensor([time.perf_counter() - start]), "max")))
    peak = int(world.all_reduce(torch.tensor([float(grown(before))], dtype=torch.float64), "max"))
    tpcore.shutdown()
    return statistics.median(seconds[1:]), peak


# -- the two beside each other ------------------------------------------------------------------------------
def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau of two rankings: pairs in the same order less pairs in another, over all pairs."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    same = sum(1 if (a[i] - a[j]) * (b[i] - b[j]) > 0 else -1 for i, j in pairs)
    return same / len(pairs)


def compare(machine: Machine, cases: Sequence[Case], steps: int, most: int) -> None:
    errors: list[float] = []
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as home:
        for case in cases:
            folder = case.write(Path(home))
            model = Reduced(folder, case.seq_len, torch.float32)
            rows: list[tuple[Prediction, float, int]] = []
            for chosen in choices(case)[:most]:
                expected = predict(model, chosen, machine)
                found = launch(measure, DEVICES, args=(folder, chosen, case.seq_len, steps))
                rows.append((expected, *found[0]))
            tau = kendall([p.step for p, _, _ in rows], [took for _, took, _ in rows]) if most > 1 else 1.0
            errors += [abs(p.step / took - 1) for p, took, _ in rows]
            memory += [abs(p.nbytes - peak) / 2**20 for p, _, peak in rows]
            say(f"\n**{case.name}**, {case.batch} x {case.seq_len} tokens: Kendall's tau of the steps {tau:.2f}\n")
            say("| mesh | predicted step | measured | ratio | predicted peak | measured |")
            say("|---|---:|---:|---:|---:|---:|")
            for p, took, peak in rows:
                times = f"{p.step:.3f} s | {took:.3f} s | {p.step / took:.2f}"
                say(f"| {p.choice} | {times} | {p.nbytes / 2**20:,.0f} MiB | {peak / 2**20:,.0f} MiB |")
    say(f"\nerror of the step: median {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    say(f"difference of the peak: median {statistics.median(memory):.0f} MiB, largest {max(memory):.0f} MiB")


# -- published runs -----------------------------------------------------------------------------------------
def published() -> None:
    """Step time, MFU and memory of public runs, and what is predicted from their configurations."""
    say("| run | devices | published step | predicted | MFU | predicted | memory | predicted | not modelled |")
    say("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as home:
        for run in RUNS:
            architecture = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[run.config["model_type"]]
            folder = Case(run.name, {**run.config, "architectures": [architecture]}, run.seq_len, 0).write(Path(home))
            machine = find(run.machine)
            machine = replace(machine, hosts=-(-run.devices // machine.per_host))
            sizes = run.mesh
            chosen = Choice(
                Ways(tp=sizes["tp"], sequence_parallel=sizes["tp"] > 1),
                pp=sizes["pp"],
                dp=sizes["dp"],
                microbatch=run.microbatch,
                microbatches=run.batch // sizes["dp"] // run.microbatch,
                recompute=run.recompute,
                zero1=True,
                bucket_mb=256,
            )
            p = predict(Reduced(folder, run.seq_len, torch.bfloat16), chosen, machine)
            held = "" if run.memory is None else f"{run.memory / 2**30:.0f} GiB"
            mfu = run.utilization(run.seconds) if run.mfu is None else run.mfu
            times = f"{run.seconds:.2f} s | {p.step:.2f} s | {mfu:.0%} | {run.utilization(p.step):.0%}"
            say(f"| {run.name} | {run.devices} | {times} | {held} | {p.nbytes / 2**30:.0f} GiB | {run.beyond} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", type=Path, help="the file of `tpcore plan --calibrate --devices 2`")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="one of the models")
    parser.add_argument("--steps", type=int, default=3, help="measured after one that does not count")
    parser.add_argument("--meshes", type=int, default=12, help="of each model, the first so many")
    parser.add_argument("--small", action="store_true", help="tiny models: shows that it runs, and no figures")
    parser.add_argument("--published", action="store_true", help="public runs instead of this machine")
    options = parser.parse_args()
    if options.published:
        published()
        return
    os.environ.setdefault("TPCORE_CHECK", "0")
    os.environ |= ALLOCATOR  # for calibration too
    machine = calibrate(devices=DEVICES) if options.machine is None else Machine.read(options.machine)
    cases = [case for case in CASES if options.case in (None, case.name)]
    if options.small:
        cases = [replace(c, config={**c.config, "num_hidden_layers": 2, "vocab_size": 512}, seq_len=32) for c in cases]
    say(f"{conditions(DEVICES)}")
    compare(machine, cases, options.steps, options.meshes)


if __name__ == "__main__":
    main()
