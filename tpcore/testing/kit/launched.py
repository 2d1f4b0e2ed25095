"""Runs the conformance kit on this process as one rank of a launcher's job, e.g. under mpirun."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any, NoReturn

import torch
from torch import Tensor

from ... import settings
from ...backend.registry import load_backend
from ...comm.comm import Comm
from ...errors import BackendError
from ...layout.mesh import Mesh
from ...runtime.context import ParallelContext, use

_ROOM = 8192  # bytes of a rank's messages: always as many, for a length would have to be told as well
_FIRST = 12  # findings that are repeated where a process ends
_DIGEST, _MORE = 8, b"\0and more"


def told(messages: Sequence[str], comm: Comm) -> list[list[str]]:
    """The messages of every rank, in group order, as many as there is room for. The backend may be wrong: they go by
    each collective that it must have, with a checksum. Collective."""
    me, mine = int(comm.position.cpu()), _packed(messages)
    rows = torch.zeros(comm.size, len(mine))  # float32 has every byte, and every backend sums it
    rows[me] = mine
    device = comm.position.device
    rows_by_rank = [_unpacked(mine) if rank == me else None for rank in range(comm.size)]
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: comm.all_gather(rows[me].unsqueeze(0).to(device), 0),
        lambda: comm.all_reduce(rows.to(device)),
        lambda: comm.reduce_scatter(rows.repeat(comm.size, 1, 1).to(device), 0)[0],
    )
    for way in ways:  # all on every rank: what has arrived on one says nothing about the others
        try:
            arrived = zip(rows_by_rank, way().cpu(), strict=True)
            rows_by_rank = [_unpacked(row) if old is None else old for old, row in arrived]
        except BackendError:
            raise
        except Exception:  # noqa: BLE001  whatever a wrong result leads to: the next way
            continue
    lost = "its messages did not arrive: all_gather, all_reduce and reduce_scatter are all wrong"
    return [[f"rank {rank}: {lost}"] if row is None else row for rank, row in enumerate(rows_by_rank)]


def _packed(messages: Sequence[str]) -> Tensor:
    """Bytes as float32: a checksum, and the messages with zeros between them."""
    text = "\0".join(message[: _ROOM // 8] for message in messages).encode(errors="backslashreplace")
    if len(text) > _ROOM:
        text = text[: _ROOM - len(_MORE)] + _MORE
    text = text.ljust(_ROOM, b"\0")
    digest = blake2b(text, digest_size=_DIGEST).digest()
    return torch.frombuffer(bytearray(digest + text), dtype=torch.uint8).float()


def _unpacked(row: Tensor) -> list[str] | None:
    data = row.to(torch.uint8).numpy().tobytes()
    digest, text = data[:_DIGEST], data[_DIGEST:]
    if blake2b(text, digest_size=_DIGEST).digest() != digest:
        return None
    return [message for message in text.decode(errors="replace").split("\0") if message]


class Launched:
    """This process as one rank of a launcher's job. A rank that fails alone leaves the others in a collective, so it
    ends its process if they do not receive its error within a sixth of the ``timeout``, the grace, or if one test takes
    the time-out (a check's attribute ``timeouts`` says how many of them) and the grace; launchers then end the other
    processes. ``say`` prints the reason, bypassing captured output."""

    def __init__(self, name: str, timeout: float = 60.0, say: Callable[[str], object] = sys.stderr.write) -> None:
        self.backend = load_backend(name)
        self._timeout, self._grace, self._say = timeout, timeout / 6, say
        self.rank, self.world = self.backend.start(timeout)
        if 1 < (started := launched_world()) != self.world:
            self.backend.stop()
            raise BackendError(
                f"{type(self.backend).__name__}.start returned rank {self.rank} of {self.world} in a job of {started} "
                "ranks: it must join the launcher's job"
            )
        self._contexts: dict[tuple[tuple[str, int], ...], ParallelContext] = {}
        self._findings: list[str] = []
        self._ended = ExitStack()

    def run(self, mesh: Mesh, fn: Callable[..., list[str]], *args: Any) -> list[list[str]]:
        key, first = tuple(mesh.axes.items()), not self._contexts
        ctx = self._contexts.setdefault(key, ParallelContext(self.backend, mesh, self.rank))
        limit, what = (
            self._timeout * getattr(fn, "timeouts", 1) + self._grace,
            f"rank {self.rank} did not come to an end",
        )
        try:
            with use(ctx), self._within(limit, what):
                if first:
                    self._choose_checks()
                wrongs_here, failed = fn(ctx, *args), False
        except Exception as e:  # noqa: BLE001  sent to the other ranks, which would go on to the next test
            wrongs_here, failed = [f"rank {self.rank}: {type(e).__name__}: {e}"], True
            limit, what = self._grace, f"{wrongs_here[0]}\nThe other ranks did not come to hear of it"
        try:
            with self._within(limit, what):
                every = told(wrongs_here, ctx.world)
            self._findings += [f"{settings.TEST.text()}: {wrongs[0]}" for wrongs in every if wrongs][:1]
            return every
        except BackendError as e:  # the others are lost, or in another collective: so are all tests that follow
            if not failed:  # it is theirs to say why, before the launcher ends them
                threading.Event().wait(self._grace)
                what = f"rank {self.rank}: {type(e).__name__}: {e}\nThe ranks cannot tell each other what they found"
            self._end(what)

    def seed(self, mine: int) -> int:
        """The first rank's, which the others are told; their own where it does not arrive. Collective."""
        world = ParallelContext(self.backend, Mesh({"dp": 1, "tp": self.world}), self.rank).world
        (first, *_), *_others = told([str(mine)], world)
        return int(first) if first.isdecimal() else mine

    def _choose_checks(self) -> None:
        """No comparison of the ranks' calls where all_gather, which carries it, is wrong: it would end every call, and
        hide what else is wrong."""
        with settings.changed({settings.CHECK.name: "off"}):
            comm = ParallelContext(self.backend, Mesh({"dp": 1, "tp": self.world}), self.rank).world
            every = (torch.arange(8 * comm.size) % 251).to(torch.uint8)
            mine = every.chunk(comm.size)[int(comm.position.cpu())].to(comm.position.device)
            got = comm.all_gather(mine, 0).cpu()
            right = got.shape == every.shape and torch.equal(got, every)
            wrong = any(told([] if right else ["all_gather"], comm))
        if wrong:
            self._ended.enter_context(settings.changed({settings.CHECK.name: "off"}))

    @contextmanager
    def _within(self, seconds: float, what: str) -> Iterator[None]:
        """End this process, and so the job, if the block takes longer than ``seconds``."""

        timer = threading.Timer(seconds, self._end, [f"{what} within {seconds:g} s"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, why: str) -> NoReturn:
        test = settings.TEST.text() or "the test"
        # pytest would print them when it ends
        before = "".join(f"found before: {finding}\n" for finding in self._findings[:_FIRST])
        if len(self._findings) > _FIRST:
            before += f"found before: {len(self._findings) - _FIRST} more\n"
        self._say(f"\n{before}tpcore: {test}: {why}: this process ends here\n")
        os._exit(1)

    def close(self) -> None:
        self._ended.close()
        self.backend.stop()


def launched_world() -> int:
    """The number of ranks of this process's launcher: torchrun, OpenMPI, MPICH or Slurm; else 1."""
    sizes = (settings.WORLD_SIZE, settings.OPENMPI_SIZE, settings.MPICH_SIZE, settings.SLURM_SIZE)
    return next((size.get() for size in sizes if size.is_set), 1)
