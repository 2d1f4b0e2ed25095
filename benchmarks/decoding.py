"""A Llama that decodes at tp=2 with quantized weights, beside float32 and bfloat16, and beside one process.

Every contestant makes the same number of tokens greedily with transformers' `generate`. Those of one process run on
rank 0 with as many threads as all ranks together, while the other rank waits. torchao's, by its `quantize_`, is left
out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers

import tpcore

from .harness import TP, Contestant, conditions, race, say, start, table


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    vocab: int
    prompt: int
    new: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, {self.new} tokens after a prompt of {self.prompt}"

    def model(self) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.LlamaForCausalLM(config).eval()


SIZES = {
    "base": Size(12, 1024, 16, 32000, 16, 16, rounds=8),  # 187 million parameters
    "tiny": Size(1, 128, 2, 64, 4, 2, rounds=1),  # for the tests
}
KINDS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8 over bfloat16": (torch.bfloat16, torch.int8),
    "float8 over bfloat16": (torch.bfloat16, torch.float8_e4m3fn),
}


def decode(model: Any, prompt: torch.Tensor, new: int) -> None:
    with torch.inference_mode():
        model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)


def alone(run: Callable[[], None], rank: int, threads: int) -> None:
    """``run`` in one process, for which the others wait."""
    if rank == 0:
        torch.set_num_threads(threads)
        run()
        torch.set_num_threads(threads // TP or 1)
    dist.barrier()


def megabytes(model: Any) -> float:
    return float(sum(p.numel() * p.element_size() for p in model.parameters())) / 2**20


def whole(size: Size, kind: str) -> Any:
    """In one process; by torchao where it is quantized."""
    dtype, quantized = KINDS[kind]
    model = size.model().to(dtype)
    if quantized is not None:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_  # type: ignore[import-not-found, import-untyped, unused-ignore]

        quantize_(model.model, Int8WeightOnlyConfig())
    return model


def run(rank: int, options: argparse.Namespace) -> None:
    tpcore.init(backend="cpu_gloo", tp=dist.get_world_size())
    transformers.logging.set_verbosity_error()
    size, threads = SIZES[options.size], TP * torch.get_num_threads()
    say(conditions() + "\n")
    prompt = torch.randint(size.vocab, (1, size.prompt), generator=torch.Generator().manual_seed(0))
    contestants, memory = [], {}
    for kind, (dtype, quantized) in KINDS.items():
        model = tpcore.parallelize(size.model().to(dtype), quantize=quantized)
        memory[f"{kind}, tp={TP}"] = megabytes(model)
        contestants.append(Contestant(f"{kind}, tp={TP}", partial(decode, model, prompt, size.new)))
    kinds = ["float32", "bfloat16", *(["int8 over bfloat16"] if importlib.util.find_spec("torchao") else [])]
    for kind in kinds:
        name = f"{kind}{' by torchao' if KINDS[kind][1] else ''}, one process"
        model = whole(size, kind) if rank == 0 else None
        memory[name] = megabytes(model) if model is not None else 0.0
        one = partial(decode, model, prompt, size.new)
        contestants.append(Contestant(name, partial(alone, one, rank, threads)))
    result = race(str(size), contestants, options.rounds or size.rounds, 1, options.warm)
    say(table(result, f"bfloat16, tp={TP}"))
    say()
    for name, seconds in result.seconds.items():
        rate = size.new / statistics.median(seconds)
        say(f"{name}: {rate:.1f} tokens a second, prompt included; {memory[name]:.0f} MiB of parameters on a rank")
    tpcore.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--rounds", type=int, help="default: 8")
    parser.add_argument("--warm", type=int, default=1, help="runs before the first round")
    parser.add_argument("--keep", action="store_true", help="call tpcore.runtime.keep_freed_memory() first")
    start(run, parser.parse_args())


if __name__ == "__main__":
    main()
