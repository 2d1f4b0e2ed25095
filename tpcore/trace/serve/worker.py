"""The program that TensorParallelModel starts once per rank."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import settings
from ...backend.programs import LoadedProgram
from ...processes.lifeline import follow
from ...processes.shared_memory import SharedBuffer
from ...processes.transfer import Outcome, pack_outcome
from ...runtime.context import ParallelContext
from ...runtime.init import init
from ...runtime.memory import keep_freed_memory
from ..artifact import TracedFile, TraceManifest, opened, program_dir, read_weights, write_weights
from .messages import answer, encoded, read_request, send, value_of
from .outputs import RankBuffer
from .replacing import shards_of

_AWAKE = 1e-3  # seconds


class Rank:
    """One rank of a traced model."""

    def __init__(self, ctx: ParallelContext, folder: Path, manifest: TraceManifest, weights: Path) -> None:
        self._ctx, self._folder, self._manifest = ctx, folder, manifest
        self._returned = len(self._manifest.outputs.shapes)
        self.take(str(weights))

    def take(self, folder: str) -> None:
        """Use the weights in ``folder`` from now on."""
        self._weights = read_weights(Path(folder), self._ctx.rank, self._manifest)
        load = self._ctx.backend.load_program
        device = self._ctx.device
        self._weights = {name: t.to(device) for name, t in self._weights.items()}
        self._programs: list[LoadedProgram] = [
            load(program_dir(self._folder, i), self._weights) for i in range(self._manifest.programs)
        ]

    @torch.inference_mode()
    def run(self, program: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a program. Returns the model's outputs, and copies the state outputs to the weights."""
        found = self._programs[program]([t.to(self._ctx.device) for t in inputs])
        for name, t in zip(self._manifest.outputs.state, found[self._returned :], strict=True):
            self._weights[name].copy_(t)
        return [t.cpu() for t in found[: self._returned]]

    def reshard(self, source: str, folder: str, save_id: str) -> TracedFile:
        """Write this rank's part of another checkpoint to ``folder``. The weights in use do not change."""
        found = shards_of(source, self._manifest, self._ctx.rank)
        found = {name: found.get(name, t) for name, t in self._weights.items()}
        return write_weights(Path(folder), self._ctx.rank, found, save_id)


class _Service:
    """Answers requests until the owner closes the model."""

    def __init__(self, rank: Rank, inputs: SharedBuffer, outputs: list[RankBuffer]) -> None:
        self._rank, self._inputs, self._outputs = rank, inputs, outputs
        self._first = settings.RANK.get() == 0
        self._prepared = lru_cache(64)(self._prepare)  # calls have few different shapes

    def _prepare(self, message: bytes) -> Callable[[], bytes]:
        name, arguments = value_of(message)
        if name == "call":
            inputs, outputs = self._inputs.get(arguments["inputs"]), self._outputs[arguments["outputs"]]
            return partial(self.call, arguments["program"], inputs, outputs)
        known: dict[str, Callable[..., Any]] = {"take": self._rank.take, "reshard": self._rank.reshard}
        return lambda: answer(True, encoded(known[name](**arguments)))

    def call(self, program: int, inputs: list[Tensor], outputs: RankBuffer) -> bytes:
        started = time.perf_counter()
        found = self._rank.run(program, inputs)
        seconds = time.perf_counter() - started
        # the outputs are the same on all ranks: the first rank returns them
        return answer(True, outputs.put(found) if self._first else b"", seconds)

    def serve(self, requests: int, replies: int) -> None:
        request = select.poll()
        request.register(requests, select.POLLIN)
        while True:
            if self._first:
                _stay_awake(request)
            try:
                message = read_request(requests)
            except EOFError:
                return
            try:
                reply = self._prepared(message)()
            except BaseException as e:  # noqa: BLE001  passed to the owner
                reply = _error_answer(e)
            send(replies, reply)


def _stay_awake(request: select.poll) -> None:
    """Yield the core to other processes, but keep it awake, as long as the next request is likely.

    A sleeping core of a virtual machine takes 50 to 80 us to wake: for the owner when it gets the answer, and
    for the ranks at the next call. Without this, consecutive calls take 60 us more. One rank is enough.
    """
    os.sched_yield()
    until = time.monotonic() + _AWAKE
    while time.monotonic() < until and not request.poll(0):
        os.sched_yield()


def _error_answer(error: BaseException) -> bytes:
    return answer(False, pack_outcome(Outcome(None, error, time.time()), settings.RANK.get()))


def _started(folder: Path, weights: Path) -> Rank:
    manifest = opened(folder)
    return Rank(init(manifest.backend, manifest.tp), folder, manifest, weights)


def main(lifeline: int, folder: Path, weights: Path, fds: list[int]) -> None:
    follow(lifeline)
    keep_freed_memory()
    requests, replies, inputs, *outputs = fds
    torch.set_num_threads(settings.THREADS.get())
    try:
        rank = _started(folder, weights)
    except BaseException as e:
        send(replies, _error_answer(e))
        raise
    send(replies, answer(True, encoded(None)))
    _Service(rank, SharedBuffer(inputs), [RankBuffer(fd) for fd in outputs]).serve(requests, replies)
    # without shutdown(), which would wait for ranks that are ending too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), [int(fd) for fd in sys.argv[4:]])
