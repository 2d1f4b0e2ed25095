"""The program that TensorParallelModel starts once per rank."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from .._remote import Outcome, outcome_of, pack_outcome
from ..context import ParallelContext, init
from ..program import Program
from .artifact import Manifest, opened, program_dir, read_weights, write_weights
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

    def reshard(self, source: str, folder: str) -> dict[str, Any]:
        """Write this rank's part of another checkpoint. Changes nothing here."""
        found = shards_of(source, self._manifest, self._ctx.rank)
        found = {name: found.get(name, t) for name, t in self._weights.items()}
        return write_weights(Path(folder), self._ctx.rank, found)._asdict()


class _Service:
    """Answers messages, ``{"do": name, argument: value}``, until the model is closed."""

    def __init__(self, rank: Rank, first: bool, inputs: SharedBuffer, outputs: SharedBuffer) -> None:
        self._rank, self._first, self._inputs, self._outputs = rank, first, inputs, outputs

    def call(self, program: int, inputs: list[Any]) -> dict[str, Any]:
        given = self._inputs.get(inputs)
        started = time.perf_counter()
        found = self._rank.run(program, given)
        seconds = time.perf_counter() - started
        # the same on all ranks
        return {"outputs": self._outputs.put(found) if self._first else [], "seconds": seconds}

    def serve(self, conn: Connection) -> None:
        known: dict[str, Callable[..., Any]] = {
            "call": self.call,
            "take": self._rank.take,
            "reshard": self._rank.reshard,
        }
        while True:
            try:
                message = json.loads(conn.recv_bytes())
            except EOFError:
                return
            _reply(conn, outcome_of(partial(known[message.pop("do")], **message)))


def _reply(conn: Connection, outcome: Outcome) -> None:
    if outcome.error is None:
        conn.send_bytes(b"\0" + json.dumps(outcome.value).encode())
    else:
        conn.send_bytes(b"\1" + pack_outcome(outcome, int(os.environ["RANK"])))


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
    conn = Connection(messages)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    outcome = outcome_of(lambda: _started(folder, weights))
    rank = outcome.value
    _reply(conn, replace(outcome, value=None))
    if outcome.error is not None:
        raise outcome.error
    first = os.environ["RANK"] == "0"
    _Service(rank, first, SharedBuffer(inputs), SharedBuffer(outputs)).serve(conn)
    # not by way of shutdown: what it would wait for are ranks that are ending too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(fd) for fd in sys.argv[3:]])
