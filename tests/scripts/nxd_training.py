"""A training script as users of NeuronX Distributed write them: its names, its order of work, its checkpoint.

    torchrun --nproc_per_node=2 nxd_training.py --tensor_parallel_size 2 --output_dir out

Only the first import below says tpcore. Float64, so that its losses can be compared with those of the
unsharded model number by number. Rank 0 prints them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn import init
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tpcore.nxd as neuronx_distributed

parallel_state = neuronx_distributed.parallel_state
checkpointing = neuronx_distributed.parallel_layers.checkpointing
grads = neuronx_distributed.parallel_layers.grads
layers = neuronx_distributed.parallel_layers.layers
move_model_to_device = neuronx_distributed.parallel_layers.move_model_to_device
parallel_cross_entropy = neuronx_distributed.parallel_layers.parallel_cross_entropy

VOCAB, HIDDEN, HEADS, TOKENS, SAMPLES = 24, 16, 4, 6, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            layers.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False, dtype=torch.float64) for _ in range(3)
        )
        self.dense = layers.RowParallelLinear(
            HIDDEN, HIDDEN, bias=True, input_is_parallel=True, dtype=torch.float64, device=False
        )
        self.heads = HEADS // parallel_state.get_tensor_model_parallel_size()

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.dense(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.ParallelEmbedding(VOCAB, HIDDEN, init.normal_, torch.float64)
        self.attention = Attention()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.up = layers.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, True, False, torch.float64)
        self.down = layers.RowParallelLinear(4 * HIDDEN, HIDDEN, True, True, torch.float64)
        self.head = layers.ColumnParallelLinear(HIDDEN, VOCAB, False, False, torch.float64)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        x = self.norm(x + self.attention(x))
        x = x + self.down(F.gelu(self.up(x)))
        return parallel_cross_entropy(self.head(x), labels).mean()


def dataset(seed):
    ids = torch.randint(VOCAB, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def train(flags):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=flags.tensor_parallel_size)
    dp, group = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_group()
    torch.manual_seed(flags.seed)
    model = Model()
    move_model_to_device(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = dataset(flags.seed)
    sampler = DistributedSampler(
        data,
        num_replicas=parallel_state.get_data_parallel_world_size(),
        rank=parallel_state.get_data_parallel_rank(),
        seed=flags.seed,
    )
    losses, norms = [], []
    for ids, labels in DataLoader(data, batch_size=flags.batch_size // dp, sampler=sampler):
        loss = model(ids, labels)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= dp
        norms.append(float(grads.clip_grad_norm(model.parameters(), flags.max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dp
        dist.all_reduce(mean, group=group)
        losses.append(float(mean))
    checkpointing.save({"model": model.state_dict(), "global_step": len(losses)}, flags.output_dir)

    resumed = Model()
    rest = checkpointing.load(flags.output_dir, resumed)
    ids, labels = data[: flags.batch_size]
    with torch.no_grad():
        same = torch.equal(resumed(ids, labels), model(ids, labels))
    return {"losses": losses, "norms": norms, "resumed": same, "global_step": rest["global_step"]}


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor_parallel_size", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_norm", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output_dir", required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    result = train(parse())
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(result))  # noqa: T201  a program: whoever runs it reads this
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
