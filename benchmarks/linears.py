"""The linear layers of one rank of an encoder, with their weights held in several ways: CPU time by number of rows.

mapped file      as safetensors maps them, in pages of 4 KiB
huge pages       copies in huge pages, as the ranks of a traced model have them
one for q, k, v  in huge pages too, the three weights as one matrix
oneDNN, MKL      reordered once for that number of rows by torch's operators, in pages of 4 KiB
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tpcore.runtime.memory import in_huge_pages

from .harness import conditions

Linear = Callable[[Tensor], Tensor]


def shapes(hidden: int) -> list[tuple[int, int]]:
    """Outputs and inputs of a layer's weights at tp=2: query, key, value, attended, up, down."""
    return [*[(hidden // 2, hidden)] * 3, (hidden, hidden // 2), (2 * hidden, hidden), (hidden, 2 * hidden)]


def contestants(layers: int, hidden: int, rows: int, folder: str) -> dict[str, list[tuple[int, Linear]]]:
    """For each way to hold the weights, the number of inputs and the function of each linear layer, in order."""
    of = shapes(hidden) * layers
    plain = {f"{i:04}": torch.randn(shape) / hidden**0.5 for i, shape in enumerate(of)}
    save_file(plain, f"{folder}/weights.safetensors")
    mapped = [load_file(f"{folder}/weights.safetensors")[name] for name in plain]
    huge = list(in_huge_pages(plain).values())
    three = {str(i): torch.cat(huge[i : i + 3]) for i in range(0, len(huge), 6)}
    joined = in_huge_pages(three)
    several = [t for i in range(0, len(huge), 6) for t in (joined[str(i)], *huge[i + 3 : i + 6])]
    dnn, mkl = torch.ops.mkldnn, torch.ops.mkl

    def by_dnn(weight: Tensor) -> Linear:
        packed = dnn._reorder_linear_weight(weight, rows)
        return lambda x: dnn._linear_pointwise(x, packed, None, "none", [], "")

    def by_mkl(weight: Tensor) -> Linear:
        packed = mkl._mkl_reorder_linear_weight(weight, rows)
        return lambda x: mkl._mkl_linear(x, packed, weight, None, rows)

    def eager(weight: Tensor) -> Linear:
        return partial(F.linear, weight=weight)

    ways = {"mapped file": (mapped, eager), "huge pages": (huge, eager), "one for q, k, v": (several, eager)}
    if torch.backends.mkldnn.is_available():
        ways["oneDNN"] = (list(plain.values()), by_dnn)
    if torch.backends.mkl.is_available():
        ways["MKL"] = (list(plain.values()), by_mkl)
    return {name: [(t.shape[1], make(t)) for t in weights] for name, (weights, make) in ways.items()}


def compared(layers: int, hidden: int, rows: int, rounds: int) -> None:
    inputs = {n: torch.randn(1, rows, n) for n in (hidden // 2, hidden, 2 * hidden)}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder, torch.inference_mode():
        ways = contestants(layers, hidden, rows, folder)
        for _ in range(rounds + 1):
            for name, linears in ways.items():
                started = time.process_time()
                for n, linear in linears:
                    linear(inputs[n])
                seconds.setdefault(name, []).append(time.process_time() - started)
    for name, each in seconds.items():
        ratios = [a / b for a, b in zip(each[1:], seconds["mapped file"][1:], strict=True)]
        print(f"| {rows} | {name} | {statistics.median(each[1:]) * 1e3:.1f} ms | {statistics.median(ratios):.3f} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    os.environ.setdefault("TPCORE_CHECK", "0")
    torch.set_num_threads(1)
    print(conditions(1) + "\n\n| rows | weights | CPU time | ratio |\n|---:|---|---:|---:|")
    for rows in options.rows:
        compared(options.layers, options.hidden, rows, options.rounds)


if __name__ == "__main__":
    main()
