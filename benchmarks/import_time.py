"""What ``import tpcore`` adds to ``import torch``: processor time of fresh interpreters."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time

STATEMENTS = ("pass", "import torch", "import tpcore", "import tpcore.cli.app")


def seconds(statement: str) -> tuple[float, float]:
    """(processor time, time) of an interpreter that runs ``statement``, from its start to its end."""
    start = time.perf_counter()
    kept = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # bytecode is kept, as it is where people install
    process = subprocess.Popen([sys.executable, "-c", statement], env=kept)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{statement!r} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for statement in STATEMENTS:
        seconds(statement)  # so that bytecode is compiled and files are in the page cache
    turns: dict[str, list[tuple[float, float]]] = {statement: [] for statement in STATEMENTS}
    draw = random.Random(0)
    for _ in range(rounds):
        for statement in draw.sample(STATEMENTS, len(STATEMENTS)):
            turns[statement].append(seconds(statement))
    print(f"**Interpreter start to end** ({rounds} rounds)\n")
    print("| | CPU time | beyond torch, in its round | time |\n|---|---:|---:|---:|")
    for statement, times in turns.items():
        busy, wall = (statistics.median(column) for column in zip(*times, strict=True))
        pairs = zip(times, turns["import torch"], strict=True)
        beyond = statistics.median(one - torch for (one, _), (torch, _) in pairs)
        print(f"| `{statement}` | {busy:.2f} s | {beyond:+.2f} s | {wall:.2f} s |")


if __name__ == "__main__":
    main()
