"""A Llama, or a Mixtral, at tp=2 that generates tokens for one Python process, beside transformers in one process.

Every contestant makes the same tokens from the same weights, greedily, and the tokens are compared first.

    transformers        model.generate in this process, with as many threads as all ranks together
    tpcore, one rank    the traced model at tp=1, with as many threads
    tpcore, tp=2        the traced model at tp=2, half of the threads for each rank
    tpcore, experts     of a Mixtral the same with whole experts on each rank, and not features of all

CPU time is that of the parent and of all processes below it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tpcore
import tpcore_hf
from tpcore.trace import TensorParallelModel, generate, parallel_model_load, parallel_model_save

from .harness import TP, Contestant, conditions, cpu_seconds, race, table


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    vocab: int
    prompt: int
    new: int
    rounds: int
    experts: int = 0

    def __str__(self) -> str:
        kind = f"Mixtral of {self.experts} experts" if self.experts else "Llama"
        sizes = f"{self.layers} layers, hidden {self.hidden}, {self.new} tokens after a prompt of {self.prompt}"
        return f"{kind}, {sizes}, float32"

    def config(self) -> Any:
        sizes: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 8 // 3 // 16 * 16,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "max_position_embeddings": 4 * (self.prompt + self.new),
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if not self.experts:
            return transformers.LlamaConfig(**sizes)
        return transformers.MixtralConfig(**sizes, num_local_experts=self.experts)


SIZES = {
    "base": Size(12, 768, 12, 32000, 128, 32, rounds=12),  # 134 million parameters
    "small": Size(4, 256, 8, 1024, 32, 64, rounds=40),
    "experts": Size(6, 512, 8, 16000, 128, 32, rounds=12, experts=8),  # 123 million parameters, a token uses 45 million
    "tiny": Size(1, 32, 4, 64, 5, 4, rounds=2),  # for the tests
    "tiny experts": Size(1, 32, 4, 64, 5, 4, rounds=2, experts=4),
}


def traced(size: Size, folder: Path, tp: int, expert_parallel: bool = False) -> Path:
    """Trace the model in ``folder`` at a degree, each rank with its part of the files."""

    def cut() -> nn.Module:
        with tpcore.lazy():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        return tpcore.parallelize(model, expert_parallel=expert_parallel)

    started = time.perf_counter()
    length = size.prompt + size.new
    with tpcore_hf.trace_causal_lm(cut, tp, max_length=length, prompt_lengths=(size.prompt,)) as model:
        parallel_model_save(model, saved := folder / f"tp{tp}{'-experts' * expert_parallel}")
    print(f"traced at tp={tp} and saved in {time.perf_counter() - started:.1f} s")
    return saved


def made_by_transformers(model: Any, prompt: Tensor, new: int) -> list[int]:
    mask, options = torch.ones_like(prompt), {"do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=new, **options)
    return [int(t) for t in tokens[0, prompt.shape[1] :]]


def made_by_ranks(model: TensorParallelModel, prompt: Tensor, new: int) -> list[int]:
    return [int(t) for t in generate(model, prompt, max_new_tokens=new)]


def run(size: Size, options: argparse.Namespace, folder: Path) -> None:
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(size.config()).eval()
    whole.save_pretrained(folder)
    prompt = torch.randint(size.vocab, (1, size.prompt), generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        one = stack.enter_context(parallel_model_load(traced(size, folder, 1)))
        two = stack.enter_context(parallel_model_load(traced(size, folder, TP)))
        runs: dict[str, Callable[[], list[int]]] = {
            "transformers": partial(made_by_transformers, whole, prompt, size.new),
            "tpcore, one rank": partial(made_by_ranks, one, prompt, size.new),
            f"tpcore, tp={TP}": partial(made_by_ranks, two, prompt, size.new),
        }
        if size.experts:
            whole_experts = stack.enter_context(parallel_model_load(traced(size, folder, TP, expert_parallel=True)))
            runs["tpcore, experts"] = partial(made_by_ranks, whole_experts, prompt, size.new)
        tokens = {name: generate() for name, generate in runs.items()}
        for name, ids in tokens.items():
            if ids != tokens["transformers"]:
                sys.exit(f"{name} makes other tokens: {ids}, not {tokens['transformers']}")
        print(f"{size}: the tokens of all {len(runs)} are the same\n")
        contestants = [Contestant(name, generate) for name, generate in runs.items()]
        result = race(f"{size}", contestants, options.rounds or size.rounds, 1, options.warm, cpu_seconds)
        print(table(result, "transformers"))
        print()
        for name, seconds in result.seconds.items():
            print(f"{name}: {size.new / statistics.median(seconds):.1f} tokens a second, prompt included")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["base", "small"])
    parser.add_argument("--rounds", type=int, help="default: 12 of the base size, 40 of the small one")
    parser.add_argument("--warm", type=int, default=2, help="runs before the first round")
    options = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)  # the ranks share the cores, as they do by default
    os.environ.setdefault("TPCORE_CHECK", "0")
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"{conditions(1)}; the ranks of a traced model share {threads} threads\n")
    for name in options.size:
        with tempfile.TemporaryDirectory(prefix="tpcore-bench-") as folder:
            run(SIZES[name], options, Path(folder))


if __name__ == "__main__":
    main()
