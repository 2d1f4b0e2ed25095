"""The kit's jobs in which a rank is lost find backends that say nothing, or the wrong thing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch

from tpcore.comm.transport import Transport
from tpcore.errors import PeerLostError
from tpcore.layout.mesh import Group, Mesh
from tpcore.testing import run_ranks
from tpcore.testing.kit.lost import Losses, lost
from tpcore_cpu_gloo import GlooBackend

# each starts jobs of three ranks: 60 processes, beside which hosts of tests/hosts look lost
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("kit")]


class HasNoTimeout(GlooBackend):
    def start(self, timeout: float) -> tuple[int, int]:
        return super().start(1e6)


def _changed(name: str, instead: Callable[..., Any], method: str = "all_reduce") -> type[GlooBackend]:
    """A backend with ``instead(rank, error, x)`` in place of what a rank gets that waits for a lost one."""

    def connect(self: Any, group: Group, rank: int) -> Transport:
        made = GlooBackend.connect(self, group, rank)
        inner = getattr(made, method)

        def guarded(x: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
            try:
                return make()
            except PeerLostError as e:
                return instead(rank, e, x)

        def call(x: torch.Tensor, *how: Any) -> Any:
            if method.startswith("start_"):
                return partial(guarded, x, inner(x, *how))
            return guarded(x, partial(inner, x, *how))

        setattr(made, method, call)
        return made

    return type(name, (GlooBackend,), {"connect": connect, "__module__": __name__})


def fail(error: BaseException) -> NoReturn:
    raise error


HangsWithTheLostRank = _changed("HangsWithTheLostRank", lambda rank, error, x: time.sleep(1e6))
StartsAlone = _changed("StartsAlone", lambda rank, error, x: x, "start_all_reduce")
RaisesItsLibrarysError = _changed("RaisesItsLibrarysError", lambda *_: fail(OSError(32, "Broken pipe")))
Dies = _changed("Dies", lambda *_: fail(SystemExit(7)))
OnlyTheFirstRankHears = _changed(
    "OnlyTheFirstRankHears", lambda rank, error, x: torch.zeros_like(x) if rank else fail(error)
)


class NeedsItsLauncher(GlooBackend):
    def start(self, timeout: float) -> tuple[int, int]:
        raise RuntimeError("start me with mpirun")


@pytest.mark.parametrize(
    ("kind", "way", "says"),
    [
        (OnlyTheFirstRankHears, "gone", "rank 2 is gone in all_reduce, and rank 1 got [0.0, 0.0, "),
        (StartsAlone, "gone", "is gone in start_all_reduce, and rank 0 got [1.0, 1.0, 1.0, 1.0, "),
        (HasNoTimeout, "late", "waits for ever: start(timeout=5) promises PeerLostError"),
        (HangsWithTheLostRank, "killed", "rank 0 waits for ever: start(timeout=5) promises"),
        (RaisesItsLibrarysError, "killed", "rank 2 got BrokenPipeError: [Errno 32] Broken pipe"),
        (NeedsItsLauncher, "gone", "set starts = False if a launcher has to start them; or rank 2 was done, and lost"),
        (Dies, "killed", "rank 2 ended with status 7: start(timeout=5) promises PeerLostError"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_it_is_found(kind: type[GlooBackend], way: str, says: str) -> None:
    plan = Losses(kind, 60.0, (way,), ("start_all_reduce" if kind is StartsAlone else "all_reduce",))
    found, other = run_ranks(Mesh({"tp": 2}), lambda ctx: lost(ctx, plan))
    assert other == []
    # the time-out is longer on a machine with other work
    assert says in re.sub(r"timeout=[\d.]+", "timeout=5", "\n".join(found))
    assert ("RuntimeError: start me with mpirun" in found[0]) == (kind is NeedsItsLauncher)
