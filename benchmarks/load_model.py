"""Peak memory of a rank while a model of transformers is opened, above the shard that it keeps.

A Llama with random weights is saved as safetensors files. Each contestant opens them in fresh processes:

    tpcore, tp=N                 tpcore.lazy, from_pretrained, tpcore.parallelize
    transformers, tp=2           from_pretrained with a DistributedConfig (needs accelerate)
    transformers, one process    from_pretrained of the whole

The peak is that of the resident memory, pages of mapped files and late imports included, above what the
process had before the first of these calls. The worse rank counts. Exits with 1 where a rank of tpcore needs
more than its shard and 256 MB.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import tpcore

from .harness import conditions, grown, resident, say, start
from .transformers_tp import SIZES, by_transformers, local

MB = 10**6
ALLOWED = 256 * MB
"""Above the shard: the goal for a model of 1 GB or more."""


def by_tpcore(folder: str) -> nn.Module:
    tpcore.init(backend="cpu_gloo", tp=dist.get_world_size())
    with tpcore.lazy():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return tpcore.parallelize(model)


def whole(folder: str) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


OPEN: dict[str, Callable[[str], nn.Module]] = {"tpcore": by_tpcore, "transformers": by_transformers, "whole": whole}


def job(rank: int, options: Namespace) -> None:
    """One contestant on one rank; rank 0 writes (peak above the start, bytes of the parameters)."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    transformers.utils.logging.disable_progress_bar()
    gc.collect()
    before = resident()
    model = OPEN[options.contestant](options.folder)
    shard = sum(local(p).numel() * p.element_size() for p in model.parameters())
    largest = torch.tensor([grown(before), shard], dtype=torch.int64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if rank == 0:
        Path(options.result).write_text(json.dumps(largest.tolist()))
    if tpcore.is_initialized():
        tpcore.shutdown()


def contestants(degrees: list[int]) -> list[tuple[str, str, int]]:
    """(name, how it opens, ranks)."""
    names = [(f"tpcore, tp={tp}", "tpcore", tp) for tp in degrees]
    if importlib.util.find_spec("accelerate"):
        names.append(("transformers, tp=2", "transformers", 2))
    return [*names, ("transformers, one process", "whole", 1)]


def show(options: Namespace) -> bool:
    """Print the table; whether every rank of tpcore kept to the limit."""
    with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(SIZES[options.size].config())
        entries = sum(p.numel() for p in model.parameters())
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model.save_pretrained(folder, max_shard_size="500MB")
        del model
        say(f"**Llama of {entries:,} parameters, {size / MB:,.0f} MB of files**\n")
        say("| | peak while opened | shard | above the shard |\n|---|---:|---:|---:|")
        fits = True
        for name, contestant, ranks in contestants(options.tp):
            one = Namespace(contestant=contestant, folder=folder, result=f"{folder}/result.json")
            start(job, one, ranks)
            peak, shard = json.loads(Path(one.result).read_text())
            fits = fits and (contestant != "tpcore" or peak - shard <= ALLOWED)
            cells = (f"{n / MB:,.0f} MB" for n in (peak, shard, peak - shard))
            say(f"| {name} | {' | '.join(cells)} |")
    return fits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    os.environ.setdefault("TPCORE_CHECK", "0")
    transformers.utils.logging.disable_progress_bar()
    fits = show(options)
    say(f"\n{conditions(max(options.tp))}, transformers {transformers.__version__}")
    if not fits:
        raise SystemExit(f"FAILED: a rank of tpcore needed more than its shard and {ALLOWED // MB} MB")


if __name__ == "__main__":
    main()
