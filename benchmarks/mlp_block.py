"""The transformer MLP block, column -> GELU -> row: what the parallel linear layers cost.

The floor does what any implementation must and nothing else. Autograd runs the same local matmuls on the
same shards (``F.linear``, ``F.gelu``, ``F.linear``); around it, outside autograd, the two sums of tensor
parallelism are written by hand:

    forward    local = linear(gelu(linear(x, w1, b1)), w2);  copied to a buffer, dist.all_reduce, + b2
    backward   local.backward(grad), b2's gradient by hand;  x.grad copied to a buffer, dist.all_reduce

The buffers are allocated once. No module, no autograd function of its own, no option looked at. It sums
the input gradient after the weight gradients are done, as a straightforward hand would write it; who
overlaps the two can be faster than the floor. There are two floors, over gloo and over shared memory
(``benchmarks/shared.py``); tpcore runs over both too. "half, alone" is a measure and no contestant: the
block of torch's own layers of half the width, with autograd and without any communication.

Every contestant gets the same weights, and its output and all five gradients are compared with those of
the unsharded block before anything is timed.
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcore
from tpcore.comm.comm import Comm

from . import peers
from .harness import Contestant, check_equal, conditions, part, race, say, start, table
from .shared import ByHand

FLOORS = FLOOR, SHARED_FLOOR, HALF = "floor over gloo", "floor over shared memory", "half, alone"
TOLERANCE = 1e-5
"""Of the largest value: float32 sums of up to 4096 terms, added in another order."""


@dataclass(frozen=True)
class Size:
    hidden: int
    ffn: int
    batch: int
    sequence: int
    rounds: int  # enough for quartiles that a second run repeats
    inner: int

    def __str__(self) -> str:
        return f"hidden {self.hidden}, ffn {self.ffn}, batch {self.batch} x {self.sequence}"


SIZES = {
    "large": Size(1024, 4096, 8, 128, rounds=60, inner=1),
    "small": Size(64, 256, 1, 16, rounds=200, inner=20),
    "tiny": Size(16, 32, 2, 4, rounds=2, inner=1),  # for the tests
}


class Block(nn.Module):
    """Two linear layers and a GELU; whose layers they are is all that differs."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


@dataclass(frozen=True)
class Entry:
    """One contestant's block: ``forward(x)``, ``both(x, grad)`` and its four parameters, w1 b1 w2 b2."""

    name: str
    forward: Callable[[Tensor], Tensor]
    both: Callable[[Tensor, Tensor], Tensor]
    parameters: list[Tensor]
    input_grad: Callable[[Tensor], Tensor | None] = lambda x: x.grad

    def clear(self, x: Tensor) -> None:
        x.grad = None
        for p in self.parameters:
            p.grad = None


def _of(name: str, block: nn.Module, finish: Callable[[Tensor], Tensor] = lambda t: t) -> Entry:
    """``finish`` waits for a tensor that may be handed out before its sum is done."""

    def both(x: Tensor, grad: Tensor) -> Tensor:
        y: Tensor = block(x)
        y.backward(grad)
        if x.grad is not None:
            finish(x.grad)
        return finish(y)

    return Entry(name, lambda x: finish(block(x)), both, list(block.parameters()))


def _shards(full: nn.Module, rank: int) -> list[Tensor]:
    w1, b1, w2, b2 = full.parameters()
    return [part(w1, 0, rank), part(b1, 0, rank), part(w2, 1, rank), b2.detach().clone()]


def floor(name: str, full: nn.Module, size: Size, rank: int, reduce: Callable[[Tensor], object]) -> Entry:
    """``reduce`` sums a tensor over the ranks, in place."""
    w1, b1, w2, b2 = (nn.Parameter(t) for t in _shards(full, rank))
    shape = (size.batch, size.sequence, size.hidden)
    y, grad_x = torch.empty(shape), torch.empty(shape)

    def forward(x: Tensor) -> Tensor:
        y.copy_(F.linear(F.gelu(F.linear(x, w1, b1)), w2))
        reduce(y)
        return y.add_(b2.detach())

    def both(x: Tensor, grad: Tensor) -> Tensor:
        local = F.linear(F.gelu(F.linear(x, w1, b1)), w2)
        y.copy_(local.detach())
        reduce(y)
        y.add_(b2.detach())
        local.backward(grad)
        b2.grad = grad.sum((0, 1))
        if x.grad is None:
            raise RuntimeError("the input needs requires_grad")
        grad_x.copy_(x.grad)
        reduce(grad_x)
        return y

    return Entry(name, forward, both, [w1, b1, w2, b2], input_grad=lambda x: grad_x)


def _floors(full: nn.Module, size: Size, rank: int) -> Iterator[Entry]:
    yield floor(FLOOR, full, size, rank, partial(dist.all_reduce, group=peers.own_group()))
    memory = ByHand(rank, size.batch * size.sequence * size.hidden * 4)
    yield floor(SHARED_FLOOR, full, size, rank, memory.all_reduce)


def _block(size: Size, group: Comm | None = None) -> Block:
    up = tpcore.ColumnParallelLinear(size.hidden, size.ffn, gather_output=False, group=group)
    return Block(up, tpcore.RowParallelLinear(size.ffn, size.hidden, input_is_parallel=True, group=group))


def _tpcore(size: Size) -> Entry:
    return _of("tpcore", _block(size))


def _over_gloo(size: Size) -> Entry:
    return _of("tpcore over gloo", _block(size, peers.gloo_comm()))


def _half(size: Size) -> Entry:
    half = size.ffn // dist.get_world_size()
    return _of(HALF, Block(nn.Linear(size.hidden, half), nn.Linear(half, size.hidden)))


def _compiled(size: Size) -> Entry:
    """The same layers, by torch.compile."""
    block = _block(size)
    block.compile(fullgraph=True)
    return _of("tpcore, compiled", block)


def _dtensor(size: Size) -> Entry:
    block = Block(nn.Linear(size.hidden, size.ffn), nn.Linear(size.ffn, size.hidden))
    parallelize_module(block, peers.mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _of("torch parallelize_module", block, peers.wait)


def _fairscale(size: Size) -> Entry:
    layers = peers.fairscale_layers()
    up = layers.ColumnParallelLinear(size.hidden, size.ffn, gather_output=False)
    down = layers.RowParallelLinear(size.ffn, size.hidden, input_is_parallel=True)
    return _of("fairscale", Block(up, down))


def _megatron(size: Size) -> Entry:
    options = peers.megatron_options()
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    up = ColumnParallelLinear(size.hidden, size.ffn, bias=True, gather_output=False, **options)
    down = RowParallelLinear(size.ffn, size.hidden, bias=True, input_is_parallel=True, skip_bias_add=False, **options)
    return _of("Megatron-core", Block(peers.FirstOfPair(up), peers.FirstOfPair(down)))


def entries(full: nn.Module, size: Size, rank: int) -> list[Entry]:
    """All that can be imported here, holding this rank's shards of ``full``."""
    makers = {
        "tpcore": _tpcore,
        "tpcore over gloo": _over_gloo,
        "compiled": _compiled,
        "torch": _dtensor,
        "fairscale": _fairscale,
        "megatron-core": _megatron,
    }
    entries = list(peers.importable({name: partial(make, size) for name, make in makers.items()}))
    for entry in entries:
        for parameter, value in zip(entry.parameters, _shards(full, rank), strict=True):
            peers.local(parameter.detach()).copy_(value)
    return [*_floors(full, size, rank), *entries]


def _check(entry: Entry, x: Tensor, grad: Tensor, full: nn.Module, rank: int) -> None:
    """Output and gradients against the unsharded block's; the output without autograd as well."""
    alone = x.detach().clone().requires_grad_()
    y = full(alone)
    dx, w1, b1, w2, b2 = torch.autograd.grad(y, [alone, *full.parameters()], grad)
    grads = [part(w1, 0, rank), part(b1, 0, rank), part(w2, 1, rank), b2]
    entry.clear(x)
    check_equal(entry.name, "output", entry.both(x, grad), y, TOLERANCE)
    check_equal(entry.name, "gradient of the input", entry.input_grad(x), dx, TOLERANCE)
    for name, parameter, want in zip(("w1", "b1", "w2", "b2"), entry.parameters, grads, strict=True):
        got = None if parameter.grad is None else peers.local(parameter.grad)
        check_equal(entry.name, f"gradient of {name}", got, want, TOLERANCE)
    with torch.inference_mode():
        check_equal(entry.name, "output in inference mode", entry.forward(x), y, TOLERANCE)


def _inference(entry: Entry, x: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return entry.forward(x)

    return run


def run(rank: int, options: argparse.Namespace) -> None:
    tpcore.init(backend="cpu_gloo", tp=dist.get_world_size())
    say(conditions() + "\n")
    for name in options.size:
        size = SIZES[name]
        torch.manual_seed(0)
        full = Block(nn.Linear(size.hidden, size.ffn), nn.Linear(size.ffn, size.hidden))
        x = torch.randn(size.batch, size.sequence, size.hidden, requires_grad=True)
        grad = torch.randn(size.batch, size.sequence, size.hidden)
        all_ = entries(full, size, rank)
        for entry in all_:
            _check(entry, x, grad, full, rank)
        say(f"\n{size}: outputs and gradients of all {len(all_)} equal those of the unsharded block\n")
        all_.append(_half(size))
        rounds = options.rounds or size.rounds
        training = [Contestant(e.name, partial(e.both, x, grad), partial(e.clear, x)) for e in all_]
        say(table(race(f"forward + backward, {size}", training, rounds, size.inner, options.warm), *FLOORS))
        say()
        inference = [Contestant(e.name, _inference(e, x)) for e in all_]
        say(table(race(f"inference, {size}", inference, rounds, size.inner, options.warm), *FLOORS))
    tpcore.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["large", "small"])
    parser.add_argument("--rounds", type=int, help="default: 60 of the large block, 200 of the small one")
    parser.add_argument("--warm", type=int, default=10, help="runs before the first round")
    parser.add_argument("--keep", action="store_true", help="call tpcore.runtime.keep_freed_memory() first")
    start(run, parser.parse_args())


if __name__ == "__main__":
    main()
