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
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpcore

from . import peers
from .harness import Contestant, check_equal, conditions, part, peak_bytes, race, say, start, table
from .losses import FLOORS, Case, Entry, Size, entries, local_only

TOLERANCE = 1e-5
"""Of the largest value: float32 sums of 30720 terms, added in another order."""


SIZES = {
    "large": Size(1024, 30522, 30720, 1024, rounds=30, inner=1),
    "small": Size(1024, 30522, 30720, 16, rounds=60, inner=5),
    "tiny": Size(16, 60, 64, 8, rounds=2, inner=1),  # for the tests
}


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
    local = part(case.logits, 1, case.rank).requires_grad_()
    check_equal(entry.name, "loss", peers.local(entry.alone(local, case.grad)), want, TOLERANCE)
    _equal_grad(entry, "gradient of the logits", local, part(_grad(logits), 1, case.rank))
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
        contestants = entries(case)
        for entry in contestants:
            _check(entry, case, hidden)
        say(f"\n{size}: losses and gradients of all {len(contestants)} equal those of the unsharded module\n")
        _compare(case, contestants, hidden, options)
    tpcore.shutdown()


def _compare(case: Case, contestants: list[Entry], hidden: Tensor, options: argparse.Namespace) -> None:
    size, grad, all_ = case.size, case.grad, [*contestants, local_only(case)]
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
    parser.add_argument("--keep", action="store_true", help="call tpcore.runtime.keep_freed_memory() first")
    start(run, parser.parse_args())


if __name__ == "__main__":
    main()
