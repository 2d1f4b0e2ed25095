"""Checkpoints of format version 1, which records a cut without its axes, are read as before.

``data/checkpoint-v1`` was written by the last tpcore of that version, on a mesh of tp=2, from ``written``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpcore
from tpcore.checkpoint import load
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

# another processor computed them: of AdamW's operations some are fused here and not there, a rounding each
ROUNDED = {"rtol": 1e-6, "atol": 1e-7}
OLD = Path(__file__).parent / "data" / "checkpoint-v1"


class Net(nn.Module):
    """Rows that are padded, strided blocks, columns, replicated and plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = tpcore.ParallelEmbedding(5, 4, pad=True)
        self.qkv = tpcore.ColumnParallelLinear(4, 12, blocks=3, gather_output=False)
        self.out = tpcore.RowParallelLinear(4, 4, input_is_parallel=True)
        self.sequence_norm = tpcore.LayerNorm(4)
        self.norm = nn.BatchNorm1d(4)


def _filled(t: Tensor, spec: Any, rank: int, n: int, scale: float) -> Tensor:
    """This rank's shard of 0, 1, 2 ... times ``scale``."""
    count = torch.arange(math.prod(spec.shape), dtype=torch.float32).reshape(spec.shape)
    return spec.shard(count * scale, rank, n).to(t.dtype)


def written(ctx: ParallelContext) -> tuple[Net, torch.optim.Optimizer]:
    """Two steps of AdamW by gradients that are functions of the place in the full tensor."""
    model, rank, n = Net(), ctx.coord("tp"), ctx.mesh.axes["tp"]
    specs = tpcore.layers.shard_specs(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(_filled(p, specs[name], rank, n, 0.25))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    for step in (1, 2):
        for name, p in model.named_parameters():
            p.grad = _filled(p, specs[name], rank, n, 0.5 * step)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_version_1_is_read_at_any_degree(tp: int) -> None:
    def rank(ctx: ParallelContext) -> None:
        want, want_optimizer = written(ctx)
        model = Net()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        rest = load(OLD, model)
        optimizer.load_state_dict(rest["optimizer"])
        assert rest["epoch"] == 3
        for (name, got), expected in zip(model.state_dict().items(), want.state_dict().values(), strict=True):
            torch.testing.assert_close(got, expected, **ROUNDED, msg=name)
        for index, values in want_optimizer.state_dict()["state"].items():
            for key, expected in values.items():
                got = optimizer.state_dict()["state"][index][key]
                torch.testing.assert_close(got, expected, **ROUNDED, msg=f"{index} {key}")

    run_ranks(Mesh({"pp": 1, "dp": 1, "tp": tp}), rank)
