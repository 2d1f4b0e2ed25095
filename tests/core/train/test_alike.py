"""A part that passes for the whole in a model of one's own shows in the gradients of what is whole on each rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.settings import CHECK, changed
from tpcore.testing import run_ranks

HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "a product": lambda x, weight: x @ weight.t(),
    "einsum": lambda x, weight: torch.einsum("bsh,vh->bsv", x, weight),
}


class Net(nn.Module):
    def __init__(self, head: str | None) -> None:
        super().__init__()
        self.embed, self.norm = tpcore.ParallelEmbedding(32, 16), tpcore.RMSNorm(16)
        self.head = tpcore.ColumnParallelLinear(16, 32, bias=False, gather_output=False)
        self.head.weight = self.embed.weight
        self.by = HEADS[head] if head else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        return self.head(x) if self.by is None else self.by(x, self.embed.weight)


def losses(ctx: ParallelContext, head: str | None, zero: bool) -> list[float]:
    torch.manual_seed(0)
    net = Net(head).double()
    named = net.named_parameters()
    optimizer = tpcore.Zero1(torch.optim.AdamW, named, lr=0.1) if zero else torch.optim.AdamW(named, lr=0.1)
    made = []
    for step in range(3):
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = tpcore.parallel_cross_entropy(net(ids).flatten(0, 1), ids.flatten()).mean()
        loss.backward()
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        made.append(loss.item())
    return made


@pytest.mark.parametrize("zero", [False, True], ids=["AdamW", "Zero1"])
@pytest.mark.parametrize("axes", [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("head", [None, *HEADS])
def test_a_sharded_weight_that_is_taken_past_its_layer_is_told(
    head: str | None, axes: dict[str, int], zero: bool
) -> None:
    def told(ctx: ParallelContext) -> None:
        with pytest.raises(ValueError, match=r"gradients of parameters 'norm.weight', whole on each tp rank, differ"):
            losses(ctx, head, zero)

    (want,) = run_ranks(Mesh({"dp": 1, "tp": 1}), losses, head, zero)
    if head is not None:
        run_ranks(Mesh(axes), told)
    with changed({CHECK.name: "off"}):
        for found in run_ranks(Mesh(axes), losses, head, zero):
            # in float64; a step by wrong gradients is another one
            assert (found == pytest.approx(want, rel=1e-9)) is (head is None)


def test_how_many_steps_are_compared_does_not_hang_on_which_objects_a_rank_keeps() -> None:
    def compared(ctx: ParallelContext) -> int:
        net, kept = Net(None), []
        for _ in range(6):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.arange(8)[None]).square().mean().backward()
            tpcore.optimizer_step(optimizer)
            if ctx.rank == 0:
                kept.append(optimizer)
        return sum(n for kind, n in ctx.comm("tp").compared.items() if "gradients" in str(kind))

    with changed({CHECK.name: "warmup"}):
        assert run_ranks(Mesh({"dp": 1, "tp": 2}), compared) == [2, 2]
