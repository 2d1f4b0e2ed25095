"""Policy gradient with a sharded policy: tp=2 generates with the very weights that it trains, no copy, no engine.

    torchrun --nproc_per_node=2 examples/policy_gradient.py --plot reward.png

A tiny Llama without any training learns by reward alone to answer with even tokens. Each round samples a group of
answers to every prompt, by transformers' ``generate_batch`` of the sharded model (``--generate plain``: by
``generate``); an answer's advantage is its reward less its group's mean, over the deviation, as in GRPO (Shao et al.
2024, arXiv:2402.03300). At other tp, or alone, it is the same program.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import tpcore

VOCABULARY, FIRST = 64, 2  # tokens 0 and 1 are padding and the end
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}


def make_policy() -> Any:
    torch.manual_seed(0)  # the same weights on all ranks, of which each keeps its shard
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    return tpcore.parallelize(transformers.LlamaForCausalLM(config))


def sample_prompts(count: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST, VOCABULARY, (count, length), generator=generator)


def rewards_of(answers: Tensor) -> Tensor:
    """Of each answer, the part of its tokens that are even."""
    return (answers % 2 == 0).float().mean(-1)


def sample_answers(model: Any, prompts: Tensor, tokens: int, how: str) -> Tensor:
    """One answer to each prompt, sampled. Every rank calls it and has the same ones: their generators are alike."""
    end = None if how == "plain" else -1  # no answer ends early
    sizes: dict[str, Any] = {
        "max_new_tokens": tokens,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
        "eos_token_id": end,
    }
    config = transformers.GenerationConfig(**sizes)
    model.eval()
    found: Tensor
    with torch.no_grad():
        if how == "plain":
            found = model.generate(prompts, generation_config=config)[:, prompts.shape[1] :]
        else:
            outputs = model.generate_batch(prompts.tolist(), generation_config=config, progress_bar=False)
            ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
            found = torch.tensor([output.generated_tokens for output in ordered])
    model.train()
    return found


def log_probs(model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
    """Of each token of the answers, ``[examples, tokens]``."""
    sequences = torch.cat([prompts, answers], 1)
    logits = model(input_ids=sequences, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float()
    found: Tensor = F.log_softmax(logits, -1).gather(-1, answers[..., None]).squeeze(-1)
    return found


def train_round(
    model: Any, optimizer: torch.optim.Optimizer, prompts: Tensor, group: int, options: argparse.Namespace
) -> float:
    """Sample, reward, step; the mean reward."""
    repeated = prompts.repeat_interleave(group, 0)
    answers = sample_answers(model, repeated, options.tokens, options.generate)
    rewards = rewards_of(answers)
    grouped = rewards.view(-1, group)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    loss = -(advantages.view(-1, 1) * log_probs(model, repeated, answers)).mean()
    loss.backward()
    tpcore.optimizer_step(optimizer, max_norm=1.0)
    optimizer.zero_grad()
    return float(rewards.mean())


def draw(rewards: Sequence[float], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.4), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.axhline(0.5, color="gray", linewidth=0.8, linestyle="--")
    axes.set(xlabel="round", ylabel="mean reward", ylim=(0.4, 1.02))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8, help="of a round")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--tokens", type=int, default=4, help="of an answer")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--generate", choices=["batch", "plain"], default="batch")
    parser.add_argument("--rewards", type=Path, help="a line of JSON for each round")
    parser.add_argument("--plot", type=Path, help="a picture of the rewards")
    options = parser.parse_args()
    ctx = tpcore.init(tp=int(os.environ.get("WORLD_SIZE", "1")))
    model = make_policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    chosen, rewards = torch.Generator().manual_seed(1), []
    for number in range(options.rounds):
        torch.manual_seed(number)  # ranks of tp sample the same tokens
        rewards.append(
            train_round(model, optimizer, sample_prompts(options.prompts, 6, chosen), options.group, options)
        )
        if ctx.rank == 0 and (number % 10 == 0 or number == options.rounds - 1):
            print(f"round {number + 1}: reward {rewards[-1]:.2f}", flush=True)
    if ctx.rank == 0 and options.rewards is not None:
        options.rewards.write_text(
            "".join(json.dumps({"round": i + 1, "reward": r}) + "\n" for i, r in enumerate(rewards))
        )
    if ctx.rank == 0 and options.plot is not None:
        draw(rewards, options.plot)
    tpcore.shutdown()


if __name__ == "__main__":
    main()
