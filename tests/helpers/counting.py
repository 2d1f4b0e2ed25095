"""The collectives that ranks make, noted by a transport of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from tpcore import Mesh, ParallelContext
from tpcore.settings import CHECK, changed
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.threads import ThreadTransport

T = TypeVar("T")


class Noted(NamedTuple):
    """One collective of one rank: its group, what it does, and the rank's input."""

    axes: tuple[str, ...]
    size: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def counted(mesh: Mesh, fn: Callable[[ParallelContext], T]) -> tuple[list[T], list[list[Noted]]]:
    """What ``run_ranks`` returns, and each rank's collectives in their order, without those of checks."""
    calls: list[list[Noted]] = [[] for _ in range(mesh.size)]

    class Noting(ThreadTransport):
        def exchange(self, call: str, x: Tensor) -> list[Tensor]:
            dtype = str(x.dtype).removeprefix("torch.")
            calls[self._rank].append(Noted(self.group.axes, self.size, call, tuple(x.shape), dtype, x.nbytes))
            return super().exchange(call, x)

    class Counting(ThreadBackend):
        def connect(self, group: Any, rank: int) -> ThreadTransport:
            return Noting(group, rank, self._world)

    with changed({CHECK.name: "off"}):
        return run_ranks(mesh, fn, backend=Counting), calls
