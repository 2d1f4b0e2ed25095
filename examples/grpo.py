"""TRL's GRPO on a sharded model: the policy of policy_gradient.py, its loop left to ``GRPOTrainer``.

    torchrun --nproc_per_node=2 examples/grpo.py

Needs ``pip install trl``. At other tp, or alone, it is the same program.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import datasets
import torch
import transformers
import trl
from policy_gradient import VOCABULARY, make_policy, sample_prompts
from tokenizers import Tokenizer, models, pre_tokenizers

import tpcore
from tpcore_hf.trl import GRPOTrainer


def make_tokenizer() -> Any:
    """Tokens are their numbers."""
    text = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    text.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=text, unk_token="0", pad_token="0", eos_token="1")


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Of each answer, the part of its tokens that are even."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    ctx = tpcore.init(tp=int(os.environ.get("WORLD_SIZE", "1")))
    prompts = sample_prompts(64, 6, torch.Generator().manual_seed(1)).tolist()
    rows = datasets.Dataset.from_dict({"prompt": [" ".join(map(str, prompt)) for prompt in prompts]})
    sizes: dict[str, Any] = {"per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 4}
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    steps: dict[str, Any] = {"max_steps": options.rounds, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    config = trl.GRPOConfig("grpo", use_cpu=True, bf16=False, gradient_checkpointing=False, **sizes, **quiet, **steps)
    trainer = GRPOTrainer(
        make_policy(), reward_funcs=even, args=config, train_dataset=rows, processing_class=make_tokenizer()
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if ctx.rank == 0:
        print(f"reward {rewards[0]:.2f}, after {options.rounds} rounds {rewards[-1]:.2f}", flush=True)
    tpcore.shutdown()


if __name__ == "__main__":
    main()
