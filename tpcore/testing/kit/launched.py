"""Runs the conformance kit on this process as one rank of a launcher's job, e.g. under mpirun."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from ... import settings
from ...backend.registry import load_backend
from ...errors import BackendError
from ...layout.mesh import Mesh
from ...runtime.consensus import gather
from ...runtime.context import ParallelContext, use


class Launched:
    """This process as one rank of a launcher's job. A rank that fails alone leaves the others in a collective, so it
    ends its process if they do not receive its error within ``grace`` seconds, or if one test takes
    ``timeout + grace``; launchers then end the other processes. ``say`` prints the reason, bypassing captured
    output."""

    def __init__(
        self, name: str, timeout: float = 60.0, grace: float = 10.0, say: Callable[[str], object] = sys.stderr.write
    ) -> None:
        self.backend = load_backend(name)
        self._timeout, self._grace, self._say = timeout, grace, say
        self.rank, self.world = self.backend.start(timeout)
        if 1 < (started := launched_world()) != self.world:
            self.backend.stop()
            raise BackendError(
                f"{type(self.backend).__name__}.start returned rank {self.rank} of {self.world} in a job of {started} "
                "ranks: it must join the launcher's job"
            )
        self._contexts: dict[tuple[tuple[str, int], ...], ParallelContext] = {}
        self._findings: list[str] = []

    def run(self, mesh: Mesh, fn: Callable[..., list[str]], *args: Any) -> list[list[str]]:
        key = tuple(mesh.axes.items())
        ctx = self._contexts.setdefault(key, ParallelContext(self.backend, mesh, self.rank))
        limit, what = self._timeout + self._grace, f"rank {self.rank} did not come to an end"
        try:
            with use(ctx), self._within(limit, what):
                found, failed = fn(ctx, *args), False
        except Exception as e:  # noqa: BLE001  sent to the other ranks, which would go on to the next test
            found, failed = [f"rank {self.rank}: {type(e).__name__}: {e}"], True
            limit, what = self._grace, f"{found[0]}\nThe other ranks did not come to hear of it"
        try:
            with self._within(limit, what):
                every = cast("list[list[str]]", gather(found, ctx.world))
            first = [f"{settings.TEST.text()}: {wrongs[0]}" for wrongs in every if wrongs][:1]
            self._findings += first
            return every
        except BackendError:  # a backend that compares calls: the others are in another collective
            if not failed:
                raise
            self._end(what)

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
        before = "".join(f"found before: {finding}\n" for finding in self._findings)
        self._say(f"\n{before}tpcore: {test}: {why}: this process ends here\n")
        os._exit(1)

    def close(self) -> None:
        self.backend.stop()


def launched_world() -> int:
    """The number of ranks of this process's launcher: torchrun, OpenMPI, MPICH or Slurm; else 1."""
    sizes = (settings.WORLD_SIZE, settings.OPENMPI_SIZE, settings.MPICH_SIZE, settings.SLURM_SIZE)
    return next((size.get() for size in sizes if size.is_set), 1)
