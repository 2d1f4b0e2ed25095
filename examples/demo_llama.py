"""`make demo-llama`: one small Llama trained whole and on a mesh, the losses compared, consolidated, served.

TinyLlama's ratios, shrunk: 32 query heads and 4 key heads. Both runs are those of `run_clm.py`, whose flags
are optimum-neuron's; the text is the language reference inside Python. The tokens of the cut model, of
transformers' `generate` in one process and of the model served at tp=2 are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

CLM = Path(__file__).with_name("run_clm.py")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
BATCH = 8  # examples of 64 tokens in one step, over all ranks
PROMPT = "an object is"
TP = 2
# Sums over ranks round differently from sums in one process, by about 1e-7 of a value, and training carries
# that on. The loss is logged with 4 bytes.
TOLERANCE = 1e-3

console = Console()


@dataclass(frozen=True)
class Run:
    name: str
    losses: list[float]
    tokens: list[int]
    seconds: float


def run_program(what: str, command: list[str], shown: list[str]) -> str:
    """What the program printed; its errors are seen. SystemExit where it fails."""
    console.print(f"\n[bold]{what}[/bold]  [dim]{shlex.join(shown)}[/dim]", highlight=False, soft_wrap=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    ended = subprocess.run(command, check=False, env=environment, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        console.print(ended.stdout[-2000:], highlight=False)
        raise SystemExit(f"{what} failed with exit code {ended.returncode}; its error is above")
    return ended.stdout


def train(name: str, out: Path, steps: int, ranks: int = 1, flags: tuple[str, ...] = (), dp: int = 1) -> Run:
    """One run in processes of its own, one thread each."""
    shutil.rmtree(out, ignore_errors=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    sizes = ",".join(f"{name}={size}" for name, size in SIZES.items())
    options = [
        *("--do_train", "--use_cpu", "--disable_tqdm=True", "--report_to=none", "--save_strategy=no"),
        *("--block_size=64", f"--per_device_train_batch_size={BATCH // dp}", f"--max_steps={steps}"),
        *("--learning_rate=3e-3", "--warmup_steps=10", "--logging_steps=1", f"--config_overrides={sizes}"),
        *(f"--prompt={PROMPT}", f"--output_dir={out}", *flags),
    ]
    script = [os.path.relpath(CLM), *options]
    shown = ["torchrun", *launcher[2:], *script] if launcher else ["python", *script]
    start = time.perf_counter()
    printed = run_program(name, [sys.executable, *launcher, *script], shown)
    state = json.loads((out / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    line = next(line for line in printed.splitlines() if line.startswith("tokens: "))
    return Run(name, losses, json.loads(line.removeprefix("tokens: ")), time.perf_counter() - start)


def consolidate(run: Path, out: Path) -> None:
    """The parts of a run as one model."""
    shutil.rmtree(out, ignore_errors=True)
    words = ["checkpoint", "consolidate", str(run), str(out)]
    run_program("consolidating", [sys.executable, "-m", "tpcore", *words], ["tpcore", *words])


def ask(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens after ``prompt`` of the consolidated model, by transformers alone in this process."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it is done in an instant
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    return list(model.generate(ids, max_new_tokens=count, **options)[0, len(prompt) :].tolist())


def cut(folder: Path) -> Any:
    """This rank's part of the consolidated model."""
    from transformers import AutoModelForCausalLM

    import tpcore

    with tpcore.lazy():
        model = AutoModelForCausalLM.from_pretrained(folder)
    return tpcore.parallelize(model)


def serve(folder: Path, traced: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of the model traced at tp=2 and loaded again, as they come: no transformers in it."""
    import tpcore_hf
    from tpcore.trace import generate, parallel_model_load, parallel_model_save

    lengths: dict[str, Any] = {"max_length": SIZES["max_position_embeddings"], "prompt_lengths": (8,)}
    with tpcore_hf.trace_causal_lm(partial(cut, folder.absolute()), TP, **lengths) as model:
        parallel_model_save(model, traced)
    with parallel_model_load(traced) as model:
        start = time.perf_counter()
        tokens = [int(token) for token in generate(model, [prompt], max_new_tokens=count)]
        rate = len(tokens) / (time.perf_counter() - start)
    console.print(f"{len(tokens)} tokens, {rate:.0f} a second, prompt included", highlight=False)
    return tokens


def answer(folder: Path, traced: Path, trained: list[int]) -> None:
    """The answers of the model opened and served, beside that in training. SystemExit where one differs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt: list[int] = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    count = len(trained) - len(prompt)
    console.print(f"\n[bold]serving[/bold]  [dim]{traced} at tp={TP}[/dim]", highlight=False, soft_wrap=True)
    answers = {
        "trained, cut": trained[len(prompt) :],
        "from_pretrained, one process": ask(folder, prompt, count),
        f"served, tp={TP}": serve(folder, traced, prompt, count),
    }
    for name, tokens in answers.items():
        console.print(f"{name}: {tokens}", highlight=False, soft_wrap=True)
    console.print(f"text: {tokenizer.decode(trained)!r}", highlight=False, soft_wrap=True)
    if len({tuple(tokens) for tokens in answers.values()}) != 1:
        raise SystemExit("FAILED: the tokens differ")


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    styles = [("#f4a259", 5.0, 0.75), ("#1d3557", 1.2, 1.0)]
    for run, (color, width, alpha) in zip(runs, styles, strict=True):
        steps = range(1, len(run.losses) + 1)
        axes.plot(steps, run.losses, label=run.name, color=color, linewidth=width, alpha=alpha)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.set_title("One Llama, trained whole and on a mesh", fontsize=12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(runs: list[Run], out: Path) -> None:
    """Picture and verdict. SystemExit where the losses disagree."""
    whole, cut = runs
    if len(whole.losses) != len(cut.losses) or not whole.losses:
        raise SystemExit(f"the runs have {len(whole.losses)} and {len(cut.losses)} steps, not as many")
    plot(runs, out / "loss.png")
    largest = max(abs(a - b) for a, b in zip(whole.losses, cut.losses, strict=True))
    console.print(
        f"\nloss {whole.losses[0]:.4f} -> {whole.losses[-1]:.4f}; largest difference between the runs "
        f"{largest:.1e}, limit {TOLERANCE:g}: {out / 'loss.png'}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"seconds, start-up included: {whole.seconds:.0f} and {cut.seconds:.0f}", highlight=False)
    if not largest <= TOLERANCE:
        raise SystemExit(f"FAILED: the losses disagree by {largest:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, default=Path("demo/llama"))
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    start = time.perf_counter()
    dp = 2 if (os.cpu_count() or 1) >= 4 else 1
    flags = (f"--tensor_parallel_size={TP}", "--zero_1")
    out = args.output_dir
    name = f"tp={TP} dp={dp}, ZeRO-1, tokens spread"
    runs = [train("one process", out / "whole", args.steps), train(name, out / "cut", args.steps, TP * dp, flags, dp)]
    report(runs, out)
    consolidate(out / "cut", out / "model")
    answer(out / "model", out / "traced", runs[1].tokens)
    console.print(f"whole demo: {time.perf_counter() - start:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
