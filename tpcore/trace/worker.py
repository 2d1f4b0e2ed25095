"""The program that TensorParallelModel starts once per rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from .._remote import Outcome, pack_outcome
from ..context import ParallelContext, init
from ..program import Program
from .artifact import FileRecord, Manifest, opened, program_dir, read_weights, write_weights
from .messages import answer, failure, receive, requested, send
from .replacing import shards_of
from .shared import SharedBuffer


class Rank:
    """One rank of a traced model."""

    def __init__(self, ctx: ParallelContext, folder: Path, manifest: Manifest, weights: Path) -> None:
        self._ctx, self._folder, self._manifest = ctx, folder, manifest
        self._returned = len(self._manifest.outputs.shapes)
        self.take(str(weights))

    def take(self, folder: str) -> None:
        """Use the weights in ``folder`` from now on."""
        self._weights = read_weights(Path(folder), self._ctx.rank, self._manifest)
        load = self._ctx.backend.load_program
        device = self._ctx.device
        self._weights = {name: t.to(device) for name, t in self._weights.items()}
        self._programs: list[Program] = [
            load(program_dir(self._folder, i), self._weights) for i in range(self._manifest.programs)
        ]

    @torch.inference_mode()
    def run(self, program: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The model's outputs; those that are state become weights."""
        found = self._programs[program]([t.to(self._ctx.device) for t in inputs])
        for name, t in zip(self._manifest.outputs.state, found[self._returned :], strict=True):
            self._weights[name].copy_(t)
        return [t.cpu() for t in found[: self._returned]]

    def reshard(self, source: str, folder: str) -> FileRecord:
        """Write this rank's part of another checkpoint. Changes nothing here."""
        found = shards_of(source, self._manifest, self._ctx.rank)
        found = {name: found.get(name, t) for name, t in self._weights.items()}
        return write_weights(Path(folder), self._ctx.rank, found)


class _Service:
    """Answers requests until the model is closed. ``seconds``: of the rank's own forward in the last."""

    def __init__(self, rank: Rank, inputs: SharedBuffer, outputs: SharedBuffer) -> None:
        self._rank, self._inputs, self._outputs = rank, inputs, outputs
        self._first = os.environ["RANK"] == "0"
        self.seconds = 0.0
        self._known: dict[str, Callable[..., Hashable]] = {
            "call": self.call,
            "take": rank.take,
            "reshard": rank.reshard,
        }

    def call(self, program: int, inputs: list[Any]) -> Hashable:
        given = self._inputs.get(inputs)
        started = time.perf_counter()
        found = self._rank.run(program, given)
        self.seconds = time.perf_counter() - started
        return self._outputs.put(found) if self._first else ()  # the same on all ranks

    def serve(self, messages: int) -> None:
        while True:
            try:
                name, arguments = requested(receive(messages))
            except EOFError:
                return
            try:
                said = answer(self._known[name](**arguments), self.seconds)
            except BaseException as e:  # noqa: BLE001  carried to the owner
                said = _failed(e)
            send(messages, said)


def _failed(error: BaseException) -> bytes:
    return failure(pack_outcome(Outcome(None, error, time.time()), int(os.environ["RANK"])))


def _end_with(lifeline: int) -> None:
    """The parent's end of this pipe closes when the parent ends, however that comes about."""
    os.read(lifeline, 1)
    os._exit(1)


def _started(folder: Path, weights: Path) -> Rank:
    manifest = opened(folder)
    return Rank(init(manifest.backend, manifest.tp), folder, manifest, weights)


def main(folder: Path, weights: Path, fds: list[int]) -> None:
    messages, inputs, outputs, lifeline = fds
    Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        rank = _started(folder, weights)
    except BaseException as e:
        send(messages, _failed(e))
        raise
    send(messages, answer(None))
    _Service(rank, SharedBuffer(inputs), SharedBuffer(outputs)).serve(messages)
    # not by way of shutdown: what it would wait for are ranks that are ending too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(fd) for fd in sys.argv[3:]])
