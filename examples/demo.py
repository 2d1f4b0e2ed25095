"""`make demo`: one BERT trained whole and cut in two, the loss curves compared, and the cut one served.

Dropout is off: with it, ranks draw different masks for their heads than one process draws for all of
them, and the curves would agree only on average.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_report import read_metrics
from rich.console import Console
from rich.table import Table

PRETRAIN = Path(__file__).with_name("bert_pretrain.py")
FILL = Path(__file__).with_name("bert_fill.py")
# Sums over two ranks round differently from sums in one process, by about 1e-7 of a value, and training
# carries that on: 1.5e-5 was the largest difference seen in 300 steps. With the sum of the input gradients
# left out of one kind of layer, it was 4e-3 at step 3 and 3e-2 at step 7.
TOLERANCE = 1e-3
AVERAGED = 10  # steps; single steps are noisy, each having masked other words

console = Console()


@dataclass(frozen=True)
class Run:
    tp: int
    about: dict[str, Any]
    metrics: list[dict[str, float]]
    seconds: float  # start-up included

    def curve(self, name: str = "mlm_loss") -> list[float]:
        return [record[name] for record in self.metrics]

    @property
    def rate(self) -> float:
        """Sequences a second, by the median report: the first ones include warming up."""
        rates = sorted(self.curve("sequences_per_second"))
        return rates[len(rates) // 2]


def train(tp: int, output_dir: Path, steps: int) -> Run:
    """One run in processes of its own, one thread each, so that ranks and not threads share the cores."""
    shutil.rmtree(output_dir, ignore_errors=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={tp}"] if tp > 1 else []
    options = {
        "tensor_parallel_degree": tp,
        "max_steps": steps,
        "warmup_steps": steps // 10,
        "max_seq_length": 64,
        "dropout": 0,
        "output_dir": output_dir,
    }
    script = [os.path.relpath(PRETRAIN), *(f"--{name}={value}" for name, value in options.items())]
    shown = ["torchrun", *launcher[2:], *script] if tp > 1 else ["python", *script]
    start = time.perf_counter()
    run_program(f"tp={tp}", [sys.executable, *launcher, *script], shown)
    about = json.loads((output_dir / "run.json").read_text())
    return Run(tp, about, read_metrics(output_dir), time.perf_counter() - start)


def fill_in(tp: int, output_dir: Path) -> None:
    """The run's last checkpoint put together, traced, served, and asked for masked words."""
    script = [os.path.relpath(FILL), f"--run={output_dir}", f"--tensor_parallel_degree={tp}"]
    run_program("serving", [sys.executable, *script], ["python", *script])


def run_program(what: str, command: list[str], shown: list[str]) -> None:
    console.print(f"\n[bold]{what}[/bold]  [dim]{shlex.join(shown)}[/dim]", highlight=False, soft_wrap=True)
    ended = subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode:
        raise SystemExit(f"{what} failed with exit code {ended.returncode}; its error is above")


def compare(one: Run, other: Run) -> list[float]:
    """The absolute difference of the loss at every step; nan agrees with nothing."""
    if len(one.metrics) != len(other.metrics) or not one.metrics:
        raise SystemExit(f"the runs have {len(one.metrics)} and {len(other.metrics)} steps, not as many")
    differences = [abs(x - y) for x, y in zip(one.curve("loss"), other.curve("loss"), strict=True)]
    return [math.inf if math.isnan(d) else d for d in differences]


def plot(runs: list[Run], differences: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [record["step"] for record in runs[0].metrics]
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.6), height_ratios=[3, 1], layout="constrained"
    )
    styles: list[dict[str, Any]] = [
        {"color": "#f4a259", "linewidth": 5.0, "alpha": 0.75},
        {"color": "#1d3557", "linewidth": 1.2},
    ]
    for run, style in zip(runs, styles, strict=True):
        processes = "1 process" if run.tp == 1 else f"{run.tp} processes"
        top.plot(steps, run.curve(), label=f"tp={run.tp}, {processes}", **style)
    top.set_ylabel("masked LM loss")
    top.set_title("One BERT, trained whole and with tensor parallelism", fontsize=12)
    top.legend(frameon=False)
    # A difference of 0 has no place on a logarithmic axis: drawn at the bottom.
    floor = 1e-8
    bottom.plot(steps, [max(d, floor) for d in differences], color="#1d3557", linewidth=1.0)
    bottom.axhline(TOLERANCE, color="#c1121f", linewidth=1.0, linestyle="--")
    bottom.annotate("limit", (steps[-1], TOLERANCE), (0, -4), textcoords="offset points", ha="right", va="top")
    bottom.set_yscale("log")
    bottom.set_ylim(floor / 2, TOLERANCE * 10)
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def summary(runs: list[Run]) -> Table:
    table = Table(title="BERT, masked language model and next sentence prediction", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(f"tp={run.tp}", justify="right")
    first, last = slice(None, AVERAGED), slice(-AVERAGED, None)

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    def mean(run: Run, name: str, part: slice) -> str:
        values = run.curve(name)[part]
        return f"{sum(values) / len(values):.4f}"

    row("processes", *(str(run.tp) for run in runs))
    row("parameters on each", *(f"{run.about['parameters_per_rank']:,}" for run in runs))
    row(f"MLM loss, first {AVERAGED} steps", *(mean(run, "mlm_loss", first) for run in runs))
    row(f"MLM loss, last {AVERAGED} steps", *(mean(run, "mlm_loss", last) for run in runs))
    row(f"NSP loss, last {AVERAGED} steps (chance: 0.6931)", *(mean(run, "nsp_loss", last) for run in runs))
    row("sequences/s", *(f"{run.rate:.0f}" for run in runs))
    row("seconds, start-up included", *(f"{run.seconds:.0f}" for run in runs))
    return table


def report(runs: list[Run], output_dir: Path) -> None:
    """Picture, table and verdict. Raises SystemExit if the curves disagree."""
    differences = compare(*runs)
    picture = output_dir / "loss.png"
    plot(runs, differences, picture)
    largest = max(differences)
    where = f"{largest:.1e} at step {differences.index(largest) + 1}, limit {TOLERANCE:g}"
    console.print()
    console.print(summary(runs))
    console.print(f"largest difference between the loss curves: {where}", highlight=False, soft_wrap=True)
    console.print(f"the curves laid over each other: {picture}", highlight=False, soft_wrap=True)
    if not largest <= TOLERANCE:
        raise SystemExit(f"FAILED: the loss curves disagree by {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, default=Path("demo"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tensor_parallel_degree", type=int, default=2, help="to compare with 1")
    arguments = parser.parse_args()
    if arguments.tensor_parallel_degree < 2 or arguments.steps < AVERAGED:
        parser.error(f"--tensor_parallel_degree must be 2 or more and --steps {AVERAGED} or more")
    start = time.perf_counter()
    degrees = (1, arguments.tensor_parallel_degree)
    runs = [train(tp, arguments.output_dir / f"tp{tp}", arguments.steps) for tp in degrees]
    report(runs, arguments.output_dir)
    fill_in(degrees[1], arguments.output_dir / f"tp{degrees[1]}")
    console.print(f"whole demo: {time.perf_counter() - start:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
