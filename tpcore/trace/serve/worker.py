"""The program that TensorParallelModel starts once per rank."""

from __future__ import annotations

import os
import pickle
import select
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from ... import settings
from ...backend.interface import LoadedProgram
from ...checkpoint.forms.source import Reading
from ...checkpoint.read.source import read_shards
from ...processes.launch import follow
from ...processes.transfer import MemoryPlace, Outcome, SharedBuffer, pack_outcome
from ...runtime.context import ParallelContext
from ...runtime.init import init
from ...runtime.memory import in_huge_pages, keep_freed_memory
from ..artifact import TracedFile, TraceManifest, opened, program_dir, read_weights, write_weights
from .workers import Reply

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
        load, device = self._ctx.backend.load_program, self._ctx.device
        if device.type == "cpu" and settings.HUGE_PAGES.get():  # what all ranks have stays mapped
            cut = {name for name, weight in self._manifest.weights.items() if weight.spec.dim is not None}
            self._weights |= in_huge_pages({name: t for name, t in self._weights.items() if name in cut})
        self._weights = {name: t.to(device) for name, t in self._weights.items()}
        self._memory = {_memory(t) for t in self._weights.values()}
        folders = [program_dir(self._folder, i) for i in range(self._manifest.programs)]
        self._programs: list[LoadedProgram] = [load(program, self._weights) for program in folders]

    @torch.inference_mode()
    def run(self, program: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a program. Returns the model's outputs, and copies the state outputs to the weights."""
        outputs = self._programs[program]([t.to(self._ctx.device) for t in inputs])
        if states := self._manifest.outputs.state:  # an output may be a weight that another output replaces
            outputs = [t.clone() if self._is_other(t, i) else t for i, t in enumerate(outputs)]
        for name, t in zip(states, outputs[self._returned :], strict=True):
            self._weights[name].copy_(t)
        return [t.cpu() for t in outputs[: self._returned]]

    def _is_other(self, t: Tensor, output: int) -> bool:
        """Whether an output has the memory of a weight, but for one that it becomes."""
        at = output - self._returned
        state = self._weights[self._manifest.outputs.state[at]] if at >= 0 else None
        return _memory(t) in self._memory and (state is None or _memory(t) != _memory(state))

    def reshard(self, source: str, folder: str, save_id: str) -> TracedFile:
        """Write this rank's part of another checkpoint to ``folder``. The weights in use do not change."""
        manifest, rank = self._manifest, self._ctx.rank
        saved = {name: weight for name, weight in manifest.weights.items() if weight.saved}
        wanted = {name: (weight.spec, weight.dtype) for name, weight in saved.items()}
        ties = {other: name for name, weight in saved.items() for other in weight.others}
        resharded = read_shards(source, wanted, rank, manifest.tp, ties=ties, how=Reading(quiet=rank != 0))
        resharded = {name: resharded.get(name, t) for name, t in self._weights.items()}
        return write_weights(Path(folder), self._ctx.rank, resharded, save_id)


def _memory(t: Tensor) -> int:
    """The same for all views of one memory; for one tensor alone where Python cannot access a device's storage."""
    try:
        return t.untyped_storage().data_ptr()
    except RuntimeError:
        return id(t)


def _serve(rank: Rank, inputs: SharedBuffer, outputs: SharedBuffer, requests: Connection, replies: Connection) -> None:
    """Answer requests until the owner closes the model."""
    first, request = settings.RANK.get() == 0, select.poll()
    request.register(requests, select.POLLIN)

    def call(program: int, places: tuple[MemoryPlace, ...]) -> tuple[tuple[MemoryPlace, ...], float]:
        started = time.perf_counter()
        results = rank.run(program, inputs.get(places))
        seconds = time.perf_counter() - started
        # the outputs are the same on all ranks: the first rank returns them
        return outputs.put(results) if first else (), seconds

    while True:
        if first:
            _stay_awake(request)
        try:
            name, arguments = pickle.loads(requests.recv_bytes())
        except EOFError:
            return
        do = call if name == "call" else getattr(rank, name)  # take or reshard
        try:
            reply: Reply = True, do(*arguments)
        except BaseException as e:  # noqa: BLE001  passed to the owner
            reply = _failed(e)
        replies.send_bytes(pickle.dumps(reply))


def _stay_awake(request: select.poll) -> None:
    """Yield the core to other processes, but keep it awake, as long as the next request is likely. A sleeping core of a
    virtual machine takes 50 to 80 us to wake: for the owner when it gets the answer, and for the ranks at the next
    call. One rank is enough."""
    until = time.monotonic() + _AWAKE
    os.sched_yield()
    while time.monotonic() < until and not request.poll(0):
        os.sched_yield()


def _failed(error: BaseException) -> Reply:
    return False, pack_outcome(Outcome(None, error, time.time()), settings.RANK.get())


def main(lifeline: int, folder: Path, weights: Path, fds: list[int]) -> None:
    follow(lifeline)
    keep_freed_memory()
    requests, replies = Connection(fds[0], writable=False), Connection(fds[1], readable=False)
    torch.set_num_threads(settings.THREADS.get())
    try:
        manifest = opened(folder)
        rank = Rank(init(manifest.backend, manifest.tp), folder, manifest, weights)
    except BaseException as e:
        replies.send_bytes(pickle.dumps(_failed(e)))
        raise
    replies.send_bytes(pickle.dumps((True, None)))
    _serve(rank, SharedBuffer(fds[2]), SharedBuffer(fds[3]), requests, replies)
    # without shutdown(), which would wait for ranks that are ending too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), [int(fd) for fd in sys.argv[4:]])
