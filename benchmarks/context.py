"""Causal attention over a long sequence whose tokens are dealt to ranks: time, bytes sent, and peak memory.

One attention layer, forward and backward, in float32 over gloo: ``scaled_dot_product_attention`` in one process, and
each way of ``ContextParallelAttention`` at each degree. Every job has processes of its own, so that its peak of
memory is its own: how far a rank's resident memory grows above what its inputs take, the largest of the ranks. Time is
the slower rank's, the median of the steps. What is sent
is what tpcore's formulas say, which its tests compare with recorded steps. All jobs of a length must find the same
output and gradients. ``--fits MIB`` is a training step of a model, with ``--states`` one of Gated DeltaNet, whose ranks
hand on a state.

``torch.distributed.tensor.experimental.context_parallel`` is no contestant: on CPU it has no attention (torch 2.13:
"Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered"; by
plain operations, "aten.add.Tensor got mixed torch.Tensor and DTensor").
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpcore
from tpcore.layers.context_parallel import ContextParallelAttention, checked_way
from tpcore_hf.sequence.sizes import AttentionSizes

from .harness import conditions, grown, resident, start

HEADS, KEYS, HEAD_DIM, PIECES = 4, 1, 32, 16
PLAIN, WAYS = "one process", ("gather", "ulysses", "ring")
TOLERANCE = 1e-5
"""Of a sum of squares: sums of float32 in another order."""


def _piece(number: int, heads: int, tokens: int) -> Tensor:
    """The same numbers wherever it is: no rank makes the whole."""
    generator = torch.Generator().manual_seed(100 * number + heads)
    return torch.randn(1, heads, tokens, HEAD_DIM, generator=generator)


def job(rank: int, options: Namespace) -> None:
    """One way at one degree, on one rank."""
    tpcore.init(backend="cpu_gloo", cp=options.degree)
    attention = ContextParallelAttention("gather" if options.way == PLAIN else options.way)
    size = options.length // PIECES
    numbers = (attention.order.places(options.length)[::size] // size).tolist()
    q, k, v = (
        torch.cat([_piece(PIECES * i + n, heads, size) for n in numbers], 2).requires_grad_()
        for i, heads in enumerate((HEADS, KEYS, KEYS))
    )
    before, seconds = resident(), []
    for _ in range(1 + options.steps):
        q.grad = k.grad = v.grad = None
        dist.barrier()
        began = time.perf_counter()
        if options.way == PLAIN:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = attention(q, k, v)
        out.square().mean().backward()
        seconds.append(time.perf_counter() - began)
    peak = grown(before)
    largest = torch.tensor([statistics.median(seconds[1:] or [0.0]), peak], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    squares = torch.stack([t.detach().double().square().sum() for t in (out, q.grad, k.grad, v.grad) if t is not None])
    squares *= torch.tensor([1, *[options.degree**-2] * 3])  # the mean is of a rank's tokens
    dist.all_reduce(squares)
    if rank == 0:
        result = {"seconds": float(largest[0]), "peak": float(largest[1]), "squares": squares.tolist()}
        Path(options.result).write_text(json.dumps(result))
    tpcore.shutdown()


def model_job(rank: int, options: Namespace) -> None:
    """A training step of a whole model, whose activations are most of its memory."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    tpcore.init(backend="cpu_gloo", cp=options.degree)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "vocab_size": 1024,
    }
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KEYS}
    heads["max_position_embeddings"] = options.length
    if options.states:
        heads |= {f"linear_num_{kind}_heads": HEADS for kind in ("key", "value")}
        heads |= {f"linear_{kind}_head_dim": HEAD_DIM for kind in ("key", "value")}
        layers = ["linear_attention"] * sizes["num_hidden_layers"]
        config = Qwen3_5TextConfig(**sizes, **heads, head_dim=HEAD_DIM, layer_types=layers)
        model: torch.nn.Module = Qwen3_5ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    if options.way != PLAIN:
        model = tpcore.parallelize(model, context_parallel=options.way)
    ids = torch.randint(1024, (1, options.length), generator=torch.Generator().manual_seed(1))
    before = resident()
    for _ in range(2):  # the second is timed
        model.zero_grad()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    largest = torch.tensor([grown(before), loss.item(), time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if rank == 0:
        names = "peak", "loss", "seconds"
        Path(options.result).write_text(json.dumps(dict(zip(names, largest.tolist(), strict=True))))
    tpcore.shutdown()


Peaks = dict[tuple[str, int], dict[int, float]]
"""MiB of a rank by way, degree and tokens."""


def draw(peaks: Peaks, limit: float, path: Path) -> None:
    """A line for each way and degree, and the limit across them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (way, degree), by_length in peaks.items():
        label = way if way == PLAIN else f"{way}, cp {degree}"
        color = "black" if way == PLAIN else f"C{WAYS.index(way)}"
        dashes = "--" if degree == 2 else "-"
        axes.plot([*by_length], [*by_length.values()], marker="o", ls=dashes, label=label, color=color)
    axes.axhline(limit, color="grey", ls=":", label=f"{limit:g} MiB")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of one sequence")
    axes.set_ylabel("peak of a rank in a training step, MiB")
    axes.set_ylim(0, 1.5 * limit)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def fits(options: Namespace, limit: float) -> None:
    """Peaks of ``model_job`` by length, and the length at which a line between two of them passes ``limit`` MiB."""
    ways = ("gather",) if options.states else WAYS  # without attention they are alike
    columns = [(PLAIN, 1), *((way, cp) for way in ways for cp in options.cp if cp > 1)]
    seconds: Peaks = {column: {} for column in columns}
    peaks: Peaks = {column: {} for column in columns}
    losses: dict[int, float] = {}
    for (way, degree), length in itertools.product(columns, sorted(options.tokens)):
        known = list(peaks[way, degree].values())
        if known and known[-1] > limit:
            continue
        with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
            one = Namespace(**vars(options), way=way, degree=degree, length=length, result=f"{folder}/result.json")
            start(model_job, one, degree)
            figures = json.loads(Path(one.result).read_text())
        if abs(figures["loss"] - losses.setdefault(length, figures["loss"])) > TOLERANCE:
            raise ValueError(f"{way}, cp {degree}: a loss of {figures['loss']}, not {losses[length]}")
        peaks[way, degree][length] = figures["peak"] / 2**20
        seconds[way, degree][length] = figures["seconds"]
    lines = ["| | cp | " + " | ".join(f"{n:,} tokens" for n in sorted(options.tokens)) + f" | {limit:g} MiB fit |"]
    lines += ["|---|" + "---:|" * (len(options.tokens) + 2)]
    for (way, degree), by_length in peaks.items():
        longest = f"{np.interp(limit, list(by_length.values()), list(by_length)):,.0f}"
        if max(by_length.values()) < limit:
            longest = f"more than {max(by_length):,}"
        spent = seconds[way, degree]
        shown = [
            f"{by_length[n]:,.0f} MiB, {spent[n]:.2f} s" if n in by_length else "-" for n in sorted(options.tokens)
        ]
        lines.append(f"| {way} | {degree} | {' | '.join(shown)} | {longest} tokens |")
    sys.stdout.write("\n".join(lines) + "\n\nall losses of a length are the same\n\n")
    if options.plot is not None:
        draw(peaks, limit, options.plot)


def measure(options: Namespace, length: int) -> None:
    lines = [f"**{length:,} tokens** ({options.steps} steps)", ""]
    lines += ["| | cp | step | sent by a rank | peak memory |", "|---|---:|---:|---:|---:|"]
    want: Tensor | None = None
    for way, degree in [(PLAIN, 1), *((way, cp) for way in WAYS for cp in options.cp)]:
        with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
            one = Namespace(**vars(options), way=way, degree=degree, length=length, result=f"{folder}/result.json")
            start(job, one, degree)
            figures = json.loads(Path(one.result).read_text())
        squares = torch.tensor(figures["squares"], dtype=torch.float64)
        want = squares if want is None else want
        if not torch.allclose(squares, want, rtol=TOLERANCE):
            raise ValueError(f"{way}, cp {degree}: squares sum to {squares.tolist()}, not {want.tolist()}")
        sizes = AttentionSizes(HEADS, KEYS, HEAD_DIM, HEADS * HEAD_DIM, 4, degree, 1)
        sent = 0 if degree == 1 else sizes.sent(checked_way(way), length)
        step = f"{figures['seconds'] * 1e3:.4g} ms" if options.steps else "-"
        lines.append(f"| {way} | {degree} | {step} | {sent / 2**20:.4g} MiB | {figures['peak'] / 2**20:.4g} MiB |")
    sys.stdout.write("\n".join(lines) + "\n\nall that ran find equal outputs and gradients\n\n")


def longest(memory: float, degrees: list[int]) -> None:
    """The longest sequence whose activations fit ``memory`` GiB of a rank, by tpcore's formulas: Llama 3.1 8B, tp 8,
    bfloat16, nothing recomputed, no padding."""
    lines = [f"**tokens of one sequence that fit {memory:g} GiB a rank**", ""]
    lines += ["| | " + " | ".join(f"cp {cp}" for cp in degrees) + " |", "|---|" + "---:|" * len(degrees)]
    for way in map(checked_way, WAYS):
        lengths = []
        for cp in degrees:
            sizes, tokens, step = AttentionSizes(4, 1, 128, 4096, 2, cp, 8), 0, 1024 * cp
            while (
                32 * (sizes.rest(tokens) + sizes.kept("ring" if cp == 1 else way, tokens, masked=False))
                <= memory * 2**30
            ):
                tokens += step
            lengths.append(f"{tokens - step:,}" if sizes.heads % cp == 0 or way != "ulysses" else "-")
        lines.append(f"| {way} | {' | '.join(lengths)} |")
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--cp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=3, help="timed in one job, after one that is not")
    parser.add_argument("--memory", type=float, help="GiB of a rank: print what fits, and measure nothing")
    parser.add_argument("--fits", type=float, help="MiB of a rank: peaks of a model's training step instead")
    parser.add_argument("--states", action="store_true", help="with --fits: a model of Gated DeltaNet alone")
    parser.add_argument("--plot", type=Path, help="a .svg or .png of what --fits finds; needs matplotlib")
    options = parser.parse_args()
    if options.states and not options.fits:
        parser.error("--states is of the model whose peaks --fits finds: give --fits MIB too")
    if options.plot is not None and not options.fits:
        parser.error("--plot draws what --fits finds: give --fits MIB too")
    if options.memory:
        return longest(options.memory, options.cp)
    if options.fits:
        fits(options, options.fits)
    for length in () if options.fits else options.tokens:
        measure(options, length)
    sys.stdout.write(f"{conditions(max(options.cp))}\n")


if __name__ == "__main__":
    main()
