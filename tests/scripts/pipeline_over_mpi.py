"""Two stages over a backend that has written no ``permute``: training equals that of the whole model.

mpirun -n 2 python pipeline_over_mpi.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore.comm.transport import Transport

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(model: nn.Module, pipe: tpcore.PipelineModel | None) -> list[float]:
    """The losses. Of a pipeline autograd runs the first half of the steps, and the engine the others."""
    optimizer, losses = torch.optim.AdamW(model.named_parameters(), lr=0.01), []
    for step in range(STEPS):
        x = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        if pipe is not None and step >= STEPS // 2:
            losses.append(pipe.run_train(x).item())
        else:
            loss = model(x)
            loss.backward()
            losses.append(loss.item())
        tpcore.optimizer_step(optimizer, max_norm=1.0) if pipe is not None else plain_step(model, optimizer)
    return losses


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    ctx = tpcore.init(backend="mpi", pp=2)
    assert ctx.backend.transport_class.permute is Transport.permute
    model = Tower()
    losses = trained(model, tpcore.PipelineModel(model, 4))
    # float64, of which the pipeline sums microbatches in another order
    torch.testing.assert_close(losses, trained(Tower(), None), rtol=1e-12, atol=1e-12)
    sys.stdout.write(f"rank {ctx.rank}: {STEPS} steps of 2 stages equal those of the whole model\n")
    tpcore.shutdown()


main()
