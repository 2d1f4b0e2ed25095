"""An encoder and the ways to run it: its ranks as processes that a parent starts beforehand and calls.

The parent copies the ids into shared memory and releases one semaphore for each process; every process runs
its part of the encoder eagerly; the parent waits for one semaphore of each. Nothing is checked, and no error
could be told. What differs between the engines is whose layers the parts are made of.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import tpcore

from . import peers
from .harness import TP, forked, part
from .shared import ByHand

COLUMNS, ROWS = ("query", "key", "value", "up"), ("attended", "down")


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    vocab: int
    batch: int
    sequence: int
    rounds: int
    inner: int
    calls: int  # in a row, for decay

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, batch {self.batch} x {self.sequence}"


class Layer(nn.Module):
    """BERT's: attention, then the MLP, each added to what came in and normalised after."""

    def __init__(self, size: Size, tp: int) -> None:
        super().__init__()
        self.head, hidden = size.hidden // size.heads, size.hidden
        self.query, self.key, self.value = (_column(tp, hidden, hidden) for _ in range(3))
        self.attended = _row(tp, hidden, hidden)
        self.up, self.down = _column(tp, hidden, 4 * hidden), _row(tp, 4 * hidden, hidden)
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x))
        )
        heads = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.first(x + self.attended(heads))
        out: Tensor = self.second(x + self.down(F.gelu(self.up(x))))
        return out


class Encoder(nn.Module):
    """With ``tp`` 0 of torch's own layers, else this rank's part of the same with the same values."""

    def __init__(self, size: Size, tp: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding = tpcore.ParallelEmbedding if tp else nn.Embedding
        self.words = embedding(size.vocab, size.hidden)
        self.places = nn.Embedding(size.sequence, size.hidden)
        self.norm = nn.LayerNorm(size.hidden)
        self.layers = nn.ModuleList(Layer(size, tp) for _ in range(size.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.norm(self.words(ids) + self.places.weight)
        for layer in self.layers:
            x = layer(x)
        return x


def _column(tp: int, inputs: int, outputs: int) -> nn.Module:
    if tp:
        return tpcore.ColumnParallelLinear(inputs, outputs, gather_output=False)
    return nn.Linear(inputs, outputs)


def _row(tp: int, inputs: int, outputs: int) -> nn.Module:
    if tp:
        return tpcore.RowParallelLinear(inputs, outputs, input_is_parallel=True)
    return nn.Linear(inputs, outputs)


# -- engines --------------------------------------------------------------------------------------------
Engine = Callable[[Size, int], nn.Module]
"""The encoder, or this rank's part of it, made in the process that will run it."""


class _Summed(nn.Module):
    """A row-parallel linear layer with nothing beside the work."""

    def __init__(self, full: nn.Linear, rank: int, memory: ByHand) -> None:
        super().__init__()
        self.weight = nn.Parameter(part(full.weight, 1, rank))
        self.bias = nn.Parameter(full.bias.detach())
        self._memory = memory

    def forward(self, x: Tensor) -> Tensor:
        return self._memory.all_reduce(F.linear(x, self.weight)).add_(self.bias)


def by_hand(size: Size, rank: int) -> nn.Module:
    """The floor: torch's own layers of half the width, and two sums a layer over shared memory."""
    encoder, memory = whole(size, rank), ByHand(rank, size.batch * size.sequence * size.hidden * 4)
    for layer in encoder.layers:
        for name in COLUMNS:
            full = getattr(layer, name)
            half = nn.Linear(full.in_features, full.out_features // TP)
            half.load_state_dict({key: part(t, 0, rank) for key, t in full.state_dict().items()})
            setattr(layer, name, half)
        for name in ROWS:
            setattr(layer, name, _Summed(getattr(layer, name), rank, memory))
    return encoder


def layers(size: Size, rank: int) -> nn.Module:
    """tpcore's layers, run eagerly."""
    tpcore.init(backend="cpu_gloo", tp=TP)
    return Encoder(size, TP)


def dtensor(size: Size, rank: int) -> nn.Module:
    """torch's parallelize_module, on which transformers' and torchtitan's plans are built."""
    encoder, mesh = whole(size, rank), peers.mesh()
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    for layer in encoder.layers:
        parallelize_module(layer, mesh, plan)
    return encoder


def deepspeed(size: Size, rank: int) -> nn.Module:
    """DeepSpeed's init_inference. Its shared-memory operator is compiled at the first start."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(TP), "LOCAL_RANK": str(rank)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(TP)}
    import deepspeed

    deepspeed.init_distributed("gloo" if dist.is_initialized() else None, verbose=False)
    engine = deepspeed.init_inference(
        whole(size, rank),
        tensor_parallel={"tp_size": TP},
        dtype=torch.float32,
        injection_policy={Layer: tuple(f".{name}" for name in ROWS)},  # as it spells a child's name
        replace_with_kernel_inject=False,
    )
    module: nn.Module = engine.module
    return module


def whole(size: Size, rank: int = 0) -> Encoder:
    return Encoder(size, 0)


class Workers:
    """``workers(ids)`` as a hand would write it, for one shape and one caller. ImportError where the engine
    misses a package."""

    def __init__(self, size: Size, folder: str, engine: Engine, world: int = TP) -> None:
        context = forked()
        self.ids = torch.zeros(size.batch, size.sequence, dtype=torch.long).share_memory_()
        self.out = torch.zeros(size.batch, size.sequence, size.hidden).share_memory_()
        self.rank_seconds = context.RawArray("d", world)  # of the last call, as the traced model has them
        self.go = [context.Semaphore(0) for _ in range(world)]
        self.done = [context.Semaphore(0) for _ in range(world)]
        missing = context.SimpleQueue()
        store = f"{folder}/store-{engine.__name__}-{world}"
        shared = (self.ids, self.out, self.rank_seconds, missing)
        self.processes = [
            context.Process(target=_worker, args=(rank, size, store, engine, shared, go, done), daemon=True)
            for rank, (go, done) in enumerate(zip(self.go, self.done, strict=True))
        ]
        with ExitStack() as stack:
            stack.callback(self.close)
            for process in self.processes:
                process.start()
            self._wait(600)  # built; DeepSpeed compiles
            if not missing.empty():
                raise ImportError(missing.get())
            stack.pop_all()

    def __call__(self, ids: Tensor) -> Tensor:
        self.ids.copy_(ids)
        for semaphore in self.go:
            semaphore.release()
        self._wait(600)  # a call of 8 x 512 takes half a minute on a quiet machine
        out: Tensor = self.out.clone()
        return out

    def _wait(self, seconds: float) -> None:
        for process, semaphore in zip(self.processes, self.done, strict=True):
            if not semaphore.acquire(timeout=seconds):
                raise RuntimeError(f"no answer of {process.name} for {seconds} s: {process}")

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def _worker(rank: int, size: Size, store: str, engine: Engine, shared: Any, go: Any, done: Any) -> None:
    ids, out, seconds, missing = shared
    world = len(seconds)
    torch.set_num_threads(TP // world)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        encoder = engine(size, rank).eval()
    except ImportError as e:
        missing.put(str(e))
        done.release()
        return
    done.release()
    with torch.inference_mode():
        while True:
            go.acquire()
            started = time.perf_counter()
            y = peers.wait(encoder(ids))
            seconds[rank] = time.perf_counter() - started
            if rank == 0:
                out.copy_(y)
            done.release()
