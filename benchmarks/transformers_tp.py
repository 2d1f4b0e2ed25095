"""A Llama or a Mixtral at tp=2: tpcore.parallelize beside the tensor parallelism of transformers itself.

Each contestant opens the same files in two fresh processes of one thread each. It takes training steps
(forward, backward, AdamW), then forwards in evaluation, and the losses are compared. Jobs are interleaved, in
another order in each round.

    transformers                 from_pretrained with a DistributedConfig of tp_size=2
    tpcore                       tpcore.lazy, from_pretrained, tpcore.parallelize
    tpcore, sequence_parallel    the same with sequence_parallel=True

and of a model of experts (``--size experts``) besides

    transformers, ep_size        with ep_size=2: whole experts on each rank
    tpcore, expert_parallel      with expert_parallel=True
    tpcore, ep                   with ep=2 and no tp: each rank has half of the examples, and sends all tokens
    tpcore, ep all_to_all        the same with dispatch="all_to_all" and room for all tokens

"opened" is the peak of a rank's memory while the model is opened, above what the process had before; "shard"
what its parameters take afterwards. transformers' own needs accelerate, and is left out where that is not
installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpcore

from .harness import TP, conditions, grown, resident, start

TOLERANCE = 1e-4
"""Of a loss after some steps: float32 sums in another order, which training carries on."""


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    vocab: int
    batch: int
    length: int
    experts: int = 0

    def config(self) -> Any:
        sizes: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 8 // 3 // 16 * 16,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "max_position_embeddings": self.length,
        }
        if not self.experts:
            return transformers.LlamaConfig(**sizes)
        return transformers.MixtralConfig(**sizes, num_local_experts=self.experts)


SIZES = {
    "large": Size(18, 1024, 16, 32000, 1, 256),  # 273 million parameters, 1.09 GB
    "base": Size(12, 768, 12, 32000, 2, 128),  # 131 million parameters
    "experts": Size(6, 512, 8, 16000, 2, 128, experts=8),  # 123 million parameters, of which a token uses 45 million
    "tiny": Size(1, 32, 4, 64, 2, 8),  # for the tests
    "tiny experts": Size(1, 32, 4, 64, 2, 8, experts=4),
}


def by_transformers(folder: str, **options: Any) -> nn.Module:
    from transformers.distributed.configuration_utils import DistributedConfig

    config: Any = DistributedConfig(tp_size=TP, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def by_tpcore(folder: str, ep: int = 1, **options: Any) -> nn.Module:
    tpcore.init(backend="cpu_gloo", tp=TP // ep, ep=ep)
    with tpcore.lazy():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return tpcore.parallelize(model, **options)


CONTESTANTS: dict[str, Callable[[str], nn.Module]] = {
    "transformers": by_transformers,
    "tpcore": by_tpcore,
    "tpcore, sequence_parallel": lambda folder: by_tpcore(folder, sequence_parallel=True),
    "transformers, ep_size": lambda folder: by_transformers(folder, ep_size=TP),
    "tpcore, expert_parallel": lambda folder: by_tpcore(folder, expert_parallel=True),
    "tpcore, ep": lambda folder: by_tpcore(folder, ep=TP),
    "tpcore, ep all_to_all": lambda folder: by_tpcore(folder, ep=TP, dispatch="all_to_all"),
}
OF_EXPERTS = {n for n in CONTESTANTS if "ep_size" in n or "expert" in n or "tpcore, ep" in n}


def local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def job(rank: int, options: Namespace) -> None:
    """One contestant on one rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(TP))
    transformers.utils.logging.disable_progress_bar()
    size: Size = SIZES[options.size]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(size.vocab, (size.batch, size.length), generator=generator)
    gc.collect()
    before = resident()
    model: Any = CONTESTANTS[options.contestant](options.folder)
    opened = grown(before)
    shard = sum(local(p).numel() * p.element_size() for p in model.parameters())
    batch = tpcore.current().batch if tpcore.is_initialized() else None
    if batch is not None and batch.size > 1:
        ids = ids.chunk(batch.size)[tpcore.current().index(batch)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses: list[float] = []

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if batch is not None and batch.size > 1:
            tpcore.reduce_gradients(model)
            loss = batch.all_reduce(loss.detach().reshape(1))[0] / batch.size
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    model.train()
    seconds = _timed(step, options)
    peak = grown(before)
    model.eval()
    forwards = _timed(forward, options)
    largest = torch.tensor([seconds, forwards, opened, peak, shard], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if rank == 0:
        keys = ("step", "forward", "opened", "peak", "shard")
        result = {**dict(zip(keys, largest.tolist(), strict=True)), "loss": losses[-1]}
        Path(options.result).write_text(json.dumps(result))
    if tpcore.is_initialized():
        tpcore.shutdown()


def _timed(run: Callable[[], None], options: Namespace) -> float:
    """The median of some runs, of which the first ones do not count."""
    seconds = []
    for i in range(options.warm + options.steps):
        dist.barrier()
        began = time.perf_counter()
        run()
        if i >= options.warm:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def race(options: Namespace, names: list[str], folder: str) -> dict[str, dict[str, list[float]]]:
    """By contestant, what its job said in each round."""
    measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    draw = random.Random(0)
    for _ in range(options.rounds):
        for name in draw.sample(names, len(names)):
            one = Namespace(**vars(options), contestant=name, folder=folder, result=f"{folder}/result.json")
            start(job, one, TP)
            for key, value in json.loads(Path(one.result).read_text()).items():
                measured[name][key].append(value)
    losses = {name: keys["loss"][0] for name, keys in measured.items()}
    want = losses["tpcore"]
    for name, got in losses.items():
        if not abs(got - want) <= TOLERANCE * want:
            raise ValueError(f"{name}: the last loss is {got}, that of tpcore {want}")
    return measured


def show(options: Namespace) -> None:
    size = SIZES[options.size]
    names = [n for n in CONTESTANTS if size.experts or n not in OF_EXPERTS]
    names = [n for n in names if n.startswith("tpcore") or importlib.util.find_spec("accelerate")]
    with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
        torch.manual_seed(0)
        whole = transformers.AutoModelForCausalLM.from_config(size.config())
        entries = sum(p.numel() for p in whole.parameters())
        whole.save_pretrained(folder)
        del whole
        measured = race(options, names, folder)
    kind = "Mixtral" if size.experts else "Llama"
    lines = [
        f"**tp 2, {kind} of {entries:,} parameters** ({options.rounds} rounds of {options.steps} steps; "
        f"the losses of all {len(measured)} are the same)",
        "",
        "| | step | ratio to tpcore | forward | ratio | opened | shard | peak of training |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        keys = measured[name]
        times = []
        for key in ("step", "forward"):
            pairs = zip(keys[key], measured["tpcore"][key], strict=True)
            ratio = statistics.median(seconds / floor for seconds, floor in pairs)
            times.append(f"{statistics.median(keys[key]) * 1e3:.4g} ms | {ratio:.3f}")
        sizes = (f"{statistics.median(keys[key]) / 2**20:.4g} MiB" for key in ("opened", "shard", "peak"))
        lines.append(f"| {name} | {' | '.join(times)} | {' | '.join(sizes)} |")
    sys.stdout.write("\n".join(lines) + "\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="that are timed in one job")
    parser.add_argument("--warm", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("TPCORE_CHECK", "0")
    transformers.utils.logging.disable_progress_bar()
    if not importlib.util.find_spec("accelerate"):
        sys.stdout.write("transformers' own is left out: it needs accelerate, which is not installed\n")
    show(options)
    sys.stdout.write(f"{conditions()}, transformers {transformers.__version__}\n")


if __name__ == "__main__":
    main()
