"""Cross entropy over a vocabulary cut by two: its time, its peak memory, and both together with the head.

The floor is written by hand for this one case, without autograd, chunks or options. Forward: one
``torch.softmax`` of the local logits, into the memory that the gradient will have; two all-reduces on
buffers allocated once, a maximum per token and two sums per token. Backward: scale that softmax in place
and take one off at the targets. Only the gradient is fresh memory, as it must be for autograd to own it.
There are three floors: over gloo, over shared memory (``benchmarks/shared.py``), and over shared memory with
the gradient in a buffer that is allocated once, which autograd could not own.

"torch, local only" is no contestant but a measure: ``F.cross_entropy`` on as many logits, through
autograd, without any communication. Its loss is that of a smaller vocabulary. All others are compared
with the unsharded cross entropy, loss and gradients, before anything is timed.

With the head, logits come from a linear layer; the floor's gradients of it are three lines by hand, the
input's summed over the ranks.

Peak memory is how far resident memory grows during one forward and backward, in units of the local
logits. The gradient that it returns is one; anything above is temporary.
"""

from __future__ import annotations

import argparse
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
from tpcore.comm import Comm

from . import peers
from .harness import Contestant, check_equal, conditions, part, peak_bytes, race, say, start, table
from .shared import ByHand

FLOORS = FLOOR, SHARED_FLOOR, KEPT = (
    "floor over gloo",
    "floor over shared memory",
    "floor over shared memory, buffer kept",
)
TOLERANCE = 1e-5
"""Of the largest value: float32 sums of 30720 terms, added in another order."""


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


SIZES = {
    "large": Size(1024, 30522, 30720, 1024, rounds=30, inner=1),
    "small": Size(1024, 30522, 30720, 16, rounds=60, inner=5),
    "tiny": Size(16, 60, 64, 8, rounds=2, inner=1),  # for the tests
}


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
        case.size.hidden,
        case.size.columns,
        bias=False,
        gather_output=False,
        tensor_model_parallel_group=group,
    )
    loss = partial(
        tpcore.parallel_cross_entropy, target=case.target, vocab_size=vocab, tensor_model_parallel_group=group
    )
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

    head = ColumnParallelLinear(
        case.size.hidden, case.size.columns, bias=False, gather_output=False, **options
    )
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
    made = list(peers.importable(makers))
    for entry in made:
        peers.local(entry.weight.detach()).copy_(part(case.weight, 0, case.rank))
    return [*_floors(case), *made]


def _fresh(logits: Tensor, pristine: Tensor) -> None:
    """Some contestants write their softmax over the logits."""
    logits.grad = None
    with torch.no_grad():
        logits.copy_(pristine)


def _clear(hidden: Tensor, weight: Tensor) -> None:
    hidden.grad = weight.grad = None


def _check(entry: Entry, case: Case, hidden: Tensor) -> None:
    """Loss and gradients against the unsharded ones, of the logits alone and through the head."""
    logits, states, weight = (t.detach().clone().requires_grad_() for t in (case.logits, hidden, case.weight))
    for source in (logits, states @ weight.t()):
        want = F.cross_entropy(source[:, : entry.vocab], case.target, reduction="none")
        want.backward(case.grad)
    mine = part(case.logits, 1, case.rank).requires_grad_()
    check_equal(entry.name, "loss", peers.local(entry.alone(mine, case.grad)), want, TOLERANCE)
    _equal_grad(entry, "gradient of the logits", mine, part(_grad(logits), 1, case.rank))
    _clear(hidden, entry.weight)
    with_head = peers.local(entry.with_head(hidden, case.grad))
    check_equal(entry.name, "loss with the head", with_head, want, TOLERANCE)
    _equal_grad(entry, "gradient of the hidden states", hidden, _grad(states))
    _equal_grad(entry, "gradient of the head", entry.weight, part(_grad(weight), 0, case.rank))


def _grad(t: Tensor) -> Tensor:
    if t.grad is None:
        raise RuntimeError("no gradient arrived")
    return t.grad


def _equal_grad(entry: Entry, what: str, t: Tensor, want: Tensor) -> None:
    check_equal(entry.name, what, peers.local(_grad(t)), want, TOLERANCE)


def run(rank: int, options: argparse.Namespace) -> None:
    tpcore.init(backend="cpu_gloo", tp=dist.get_world_size())
    say(conditions() + "\n")
    for name in options.size:
        size = SIZES[name]
        torch.manual_seed(0)
        hidden = torch.randn(size.tokens, size.hidden, requires_grad=True)
        weight = torch.randn(size.columns, size.hidden) / size.hidden**0.5
        target = torch.randint(size.vocab, (size.tokens,))
        case = Case(size, hidden.detach(), weight, target, torch.rand(size.tokens), rank)
        made = entries(case)
        for entry in made:
            _check(entry, case, hidden)
        say(f"\n{size}: losses and gradients of all {len(made)} equal those of the unsharded module\n")
        _compare(case, made, hidden, options)
    tpcore.shutdown()


def _compare(case: Case, made: list[Entry], hidden: Tensor, options: argparse.Namespace) -> None:
    size, grad, all_ = case.size, case.grad, [*made, local_only(case)]
    rounds = options.rounds or size.rounds
    pristine = part(case.logits, 1, case.rank)
    logits = pristine.clone().requires_grad_()
    fresh = partial(_fresh, logits, pristine)
    alone = [Contestant(e.name, partial(e.alone, logits, grad), fresh) for e in all_]
    say(table(race(f"cross entropy alone, {size}", alone, rounds, size.inner, options.warm), *FLOORS))

    say("\n| | peak memory, in local logits |\n|---|---:|")
    for contestant in alone:
        peak = peak_bytes(contestant)
        shown = "not measured" if peak is None else f"{peak / (pristine.numel() * 4):.2f}"
        say(f"| {contestant.name} | {shown} |")
    logits.grad = None

    say()
    clear = partial(_clear, hidden)
    whole = [Contestant(e.name, partial(e.with_head, hidden, grad), partial(clear, e.weight)) for e in all_]
    say(table(race(f"head and cross entropy, {size}", whole, max(2, rounds // 3), size.inner, 1), *FLOORS))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["large"])
    parser.add_argument("--rounds", type=int, help="default: 30")
    parser.add_argument("--warm", type=int, default=3, help="runs before the first round")
    parser.add_argument("--keep", action="store_true", help="call tpcore.keep_freed_memory() first")
    start(run, parser.parse_args())


if __name__ == "__main__":
    main()
