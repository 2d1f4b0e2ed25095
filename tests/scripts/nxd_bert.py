"""A masked language model, trained as NxD's BERT example does it: loop, logs and checkpoints by hand."""

from __future__ import annotations

import argparse
import math
import os

import neuronx_distributed as nxd
import torch
from neuronx_distributed.parallel_layers import checkpointing, grads, layers, mappings, parallel_state
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.utils import get_local_world_size
from neuronx_distributed.utils.model_utils import move_model_to_device
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, HIDDEN, HEADS = 32, 16, 4


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        tp = parallel_state.get_tensor_model_parallel_size()
        self.heads = HEADS // tp
        self.query, self.key, self.value = (
            layers.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False) for _ in range(3)
        )
        self.dense = layers.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in (self.query, self.key, self.value)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        return self.norm(x + self.dense((scores @ v).transpose(1, 2).flatten(-2)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = SelfAttention()
        self.up = layers.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False)
        self.down = layers.RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        x = self.attention(x)
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = layers.ParallelEmbedding(VOCAB, HIDDEN, init_method=nn.init.normal_)
        self.layer = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = layers.ColumnParallelLinear(HIDDEN, VOCAB, gather_output=False)
        self.decoder.weight = self.words.weight

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layer:
            x = layer(x)
        return parallel_cross_entropy(self.decoder(x), labels).mean()


def data():
    drawn = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCAB, (48, 8), generator=drawn)
    ids = labels.clone()
    ids[:, ::3] = 0
    return TensorDataset(ids, labels)


def train(flags):
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=flags.tensor_parallel_size)
    os.makedirs(flags.output_dir, exist_ok=True)
    with open(os.path.join(flags.output_dir, "events.log"), "a") as log:
        log.write(f"{get_local_world_size()}\n")
    torch.manual_seed(12)
    model = Bert()
    move_model_to_device(model, "cpu")
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=flags.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    start = 0
    if flags.resume:
        saved = checkpointing.load(flags.output_dir, model=model)
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        start = saved["step"]
    dp = parallel_state.get_data_parallel_size()
    sampler = DistributedSampler(data(), num_replicas=dp, rank=parallel_state.get_data_parallel_rank(), shuffle=False)
    losses = []
    for step, (ids, labels) in enumerate(DataLoader(data(), batch_size=8 // dp, sampler=sampler)):
        if not start <= step < start + flags.steps:
            continue
        loss = model(ids, labels)
        loss.backward()
        grads.bucket_allreduce_gradients([p.grad for p in model.parameters()])
        grads.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach() / dp
        mappings.reduce_from_tensor_model_parallel_region(mean, process_group=parallel_state.get_data_parallel_group())
        losses.append(mean.item())
    checkpointing.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": start + flags.steps,
        },
        flags.output_dir,
    )
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--tensor_parallel_size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--resume", action="store_true")
    nxd.utils.master_print(train(parser.parse_args()))
