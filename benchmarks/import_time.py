"""What ``import tpcore`` adds to ``import torch``: both in fresh interpreters, in turns."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

STATEMENTS = ("pass", "import torch", "import torch, tpcore")


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    seconds(STATEMENTS[-1])  # so that bytecode is compiled and files are in the page cache
    taken = [[seconds(statement) for statement in STATEMENTS] for _ in range(rounds)]
    print(f"**Interpreter start to end** ({rounds} rounds)\n\n| | median | fastest |\n|---|---:|---:|")
    for statement, times in zip(STATEMENTS, zip(*taken, strict=True), strict=True):
        print(f"| `{statement}` | {statistics.median(times):.2f} s | {min(times):.2f} s |")


if __name__ == "__main__":
    main()
