"""The contestants of ``cross_entropy.py``: floors by hand, tpcore, and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import tpcore
from tpcore.comm.comm import Comm

from . import peers
from .harness import part
from .shared import ByHand

FLOORS = FLOOR, SHARED_FLOOR, KEPT = (
    "floor over gloo",
    "floor over shared memory",
    "floor over shared memory, buffer kept",
)


@dataclass(frozen=True)
class Size:
    hidden: int
    vocab: int
    columns: int  # vocab, padded as Megatron does: to a multiple of 128 per rank
    tokens: int
    rounds: int
    inner: int

    def __str__(self) -> str:
        return f"hidden {self.hidden}, vocabulary {self.vocab} padded to {self.columns}, {self.tokens} tokens"


@dataclass(frozen=True)
class Case:
    """One problem: the unsharded logits and weight, and what this rank holds of it."""

    size: Size
    hidden: Tensor
    weight: Tensor
    target: Tensor
    grad: Tensor  # of the loss per token
    rank: int

    @property
    def logits(self) -> Tensor:
        return self.hidden @ self.weight.t()


@dataclass(frozen=True)
class Entry:
    """One contestant: ``alone(logits, grad)`` and ``with_head(hidden, grad)`` return the loss per token and
    leave gradients on what they were given and on ``weight``."""

    name: str
    alone: Callable[[Tensor, Tensor], Tensor]
    with_head: Callable[[Tensor, Tensor], Tensor]
    weight: Tensor
    vocab: int | None = None  # how many of the columns count, where not all do


def _of(
    name: str,
    loss: Callable[[Tensor], Tensor],
    head: nn.Module,
    vocab: int | None = None,
    backward: Callable[[Tensor, Tensor], None] = torch.autograd.backward,
) -> Entry:
    def alone(logits: Tensor, grad: Tensor) -> Tensor:
        out = loss(logits)
        backward(out, grad)
        return out

    def with_head(hidden: Tensor, grad: Tensor) -> Tensor:
        return alone(head(hidden), grad)

    return Entry(name, alone, with_head, next(head.parameters()), vocab)


def floor(name: str, case: Case, reduce: Callable[[Tensor, str], object], keep: bool = False) -> Entry:
    """``reduce`` takes the "sum" or "max" of a tensor over the ranks, in place."""
    width, tokens = case.size.columns // dist.get_world_size(), case.size.tokens
    weight = nn.Parameter(part(case.weight, 0, case.rank))
    local = case.target - case.rank * width
    rows = torch.nonzero((local >= 0) & (local < width)).squeeze(1)
    ids = local[rows]
    top, sums, grad_hidden = torch.empty(tokens), torch.empty(2, tokens), torch.empty_like(case.hidden)
    kept = torch.empty(tokens, width) if keep else None

    def both(logits: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.softmax(logits, -1) if kept is None else torch.softmax(logits, -1, out=kept)
        largest = logits.amax(-1)
        top.copy_(largest)
        reduce(top, "max")
        share = largest.sub_(top).exp_().div_(out.amax(-1))  # this rank's sum of exp(logit - top)
        sums[0] = share
        sums[1].zero_()[rows] = logits[rows, ids]
        reduce(sums, "sum")
        out.mul_(share.div_(sums[0]).mul_(grad).unsqueeze(-1))
        out[rows, ids] -= grad[rows]
        return sums[0].log().add_(top).sub_(sums[1]), out

    @torch.no_grad()
    def alone(logits: Tensor, grad: Tensor) -> Tensor:
        loss, logits.grad = both(logits, grad)
        return loss

    @torch.no_grad()
    def with_head(hidden: Tensor, grad: Tensor) -> Tensor:
        loss, grad_logits = both(F.linear(hidden, weight), grad)
        torch.mm(grad_logits, weight, out=grad_hidden)
        weight.grad = grad_logits.t() @ hidden
        reduce(grad_hidden, "sum")
        hidden.grad = grad_hidden
        return loss

    return Entry(name, alone, with_head, weight)


def _floors(case: Case) -> Iterator[Entry]:
    group, op = peers.own_group(), {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    yield floor(FLOOR, case, lambda x, how: dist.all_reduce(x, op[how], group=group))
    memory = ByHand(case.rank, case.hidden.numel() * 4)
    yield floor(SHARED_FLOOR, case, memory.all_reduce)
    yield floor(KEPT, case, memory.all_reduce, keep=True)


def local_only(case: Case) -> Entry:
    """torch's own on as many logits as a rank holds, nothing exchanged: a measure, not a contestant."""
    width = case.size.columns // dist.get_world_size()
    head = nn.Linear(case.size.hidden, width, bias=False)
    loss = partial(F.cross_entropy, target=case.target % width, reduction="none")
    return _of("torch, local only", loss, head)


def _tpcore(name: str, case: Case, vocab: int | None = None, group: Comm | None = None) -> Entry:
    head = tpcore.ColumnParallelLinear(
        case.size.hidden, case.size.columns, bias=False, gather_output=False, group=group
    )
    loss = partial(tpcore.parallel_cross_entropy, target=case.target, vocab_size=vocab, group=group)
    return _of(name, loss, head, vocab)


def _over_gloo(case: Case) -> Entry:
    return _tpcore("tpcore over gloo", case, group=peers.gloo_comm())


def _loss_parallel(case: Case) -> Entry:
    mesh = peers.mesh()
    head = nn.Sequential(nn.Linear(case.size.hidden, case.size.columns, bias=False))
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(head, mesh, {"0": style})

    def loss(logits: Tensor) -> Tensor:
        whole = logits if isinstance(logits, DTensor) else DTensor.from_local(logits, mesh, [Shard(-1)])
        with loss_parallel():
            return F.cross_entropy(whole, case.target, reduction="none")

    def backward(loss: Tensor, grad: Tensor) -> None:
        with loss_parallel():
            torch.autograd.backward(loss, DTensor.from_local(grad, mesh))

    return _of("torch loss_parallel", loss, head, backward=backward)


def _fairscale(case: Case) -> Entry:
    layers = peers.fairscale_layers()
    from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy

    head = layers.ColumnParallelLinear(case.size.hidden, case.size.columns, bias=False, gather_output=False)
    return _of("fairscale", partial(vocab_parallel_cross_entropy, target=case.target), head)


def _megatron(case: Case) -> Entry:
    options = peers.megatron_options()
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy

    head = ColumnParallelLinear(case.size.hidden, case.size.columns, bias=False, gather_output=False, **options)
    loss = partial(vocab_parallel_cross_entropy, target=case.target)
    return _of("Megatron-core", loss, peers.FirstOfPair(head))


def entries(case: Case) -> list[Entry]:
    """All that can be imported here, with this rank's part of the weight."""
    makers: dict[str, Callable[[], Entry]] = {
        "tpcore": partial(_tpcore, "tpcore", case),
        "tpcore masked": partial(_tpcore, "tpcore, padding masked", case, case.size.vocab),
        "tpcore over gloo": partial(_over_gloo, case),
        "torch": partial(_loss_parallel, case),
        "fairscale": partial(_fairscale, case),
        "megatron-core": partial(_megatron, case),
    }
    entries = list(peers.importable(makers))
    for entry in entries:
        peers.local(entry.weight.detach()).copy_(part(case.weight, 0, case.rank))
    return [*_floors(case), *entries]
