"""A transformer block with everything a model is made of, parallel and plain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore

VOCAB, HIDDEN, HEADS = 32, 16, 4


class Block(nn.Module):
    """Embedding, norm, fused attention, MLP, head: with sequence parallelism along dim 1, or without."""

    def __init__(self, sequence_parallel: bool, tp: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        on = {"sequence_dim": 1} if sequence_parallel else {}
        norm = {"sequence_parallel": True} if sequence_parallel else {}
        self.heads = HEADS // tp
        self.embed = tpcore.ParallelEmbedding(VOCAB, HIDDEN, dtype=dtype, **on)
        self.norm1 = tpcore.LayerNorm(HIDDEN, dtype=dtype, **norm)
        self.qkv = tpcore.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, gather_output=False, blocks=3, dtype=dtype, **on)
        self.out = tpcore.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, dtype=dtype, **on)
        self.norm2 = tpcore.RMSNorm(HIDDEN, dtype=dtype, **norm)
        self.up = tpcore.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, dtype=dtype, **on)
        self.down = tpcore.RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, dtype=dtype, **on)
        self.head = tpcore.ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False, dtype=dtype, **on)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def body(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm1(h))
        return h + self.down(F.gelu(self.up(self.norm2(h))))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(ids)))
        return tpcore.parallel_cross_entropy(logits, ids.roll(1, 1)).mean()
