"""The steps of ``fake_device.py``, by models of transformers."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from fake_device import main, moved, trained

import tpcore
from tpcore.runtime.context import ParallelContext
from tpcore_hf.sequence import batch as dealt


def of_transformers(ctx: ParallelContext, config: Any, **options: Any) -> None:
    model = moved(
        ctx,
        lambda: tpcore.parallelize(
            transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), **options
        ),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    trained(model, optimizer, lambda ids: model(input_ids=ids, labels=ids).loss)


SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def context(ctx: ParallelContext) -> None:
    for way in ("gather", "ulysses", "ring"):
        of_transformers(ctx, transformers.LlamaConfig(**SIZES), context_parallel=way)


def experts(ctx: ParallelContext) -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    for options in ({}, {"dispatch": "all_to_all"}):
        of_transformers(ctx, config, expert_parallel=True, **options)


if __name__ == "__main__":
    dealt.compare_ranks = lambda *_: None  # type: ignore[assignment]  once in a job, of the first batch's values
    cases = {
        "llama": lambda ctx: of_transformers(ctx, transformers.LlamaConfig(**SIZES), sequence_parallel=True),
        "context": context,
        "experts": experts,
    }
    sys.exit(main(cases, {"context": {"dp": 1, "cp": 2, "tp": 2}, "experts": {"dp": 1, "ep": 2, "tp": 2}}))
