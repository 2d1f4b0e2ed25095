"""The kit's jobs in which a rank is lost find backends that say nothing, or the wrong thing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from tpcore_cpu_gloo import GlooBackend

from tpcore.comm.transport import Pending, Transport
from tpcore.errors import CollectiveMismatchError, PeerLostError
from tpcore.layout.mesh import Group, Mesh
from tpcore.testing import run_ranks
from tpcore.testing.kit.lost import Losses, lost

# each starts jobs of three ranks: 60 processes, beside which hosts of tests/hosts look lost
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("kit")]


class HasNoTimeout(GlooBackend):
    def start(self, timeout: float) -> tuple[int, int]:
        return super().start(1e6)


class _Changed(GlooBackend):
    """What a rank gets that waits for a lost one is changed."""

    instead: Callable[..., torch.Tensor]

    def connect(self, group: Group, rank: int) -> Transport:
        made: Any = super().connect(group, rank)
        inner = made.all_reduce

        def all_reduce(x: torch.Tensor, op: Any, donate: bool) -> torch.Tensor:
            try:
                return inner(x, op, donate)
            except PeerLostError as e:
                return self.instead(e, x)

        made.all_reduce = all_reduce
        return made


def _changed(name: str, instead: Callable[..., Any]) -> type[GlooBackend]:
    return type(name, (_Changed,), {"instead": instead, "__module__": __name__})


def fail(error: BaseException) -> NoReturn:
    raise error


HangsWithTheLostRank = _changed("HangsWithTheLostRank", lambda self, error, x: time.sleep(1e6))
GoesOnAlone = _changed("GoesOnAlone", lambda self, error, x: x)
RaisesItsLibrarysError = _changed("RaisesItsLibrarysError", lambda self, error, x: fail(OSError(32, "Broken pipe")))
BlamesTheProgram = _changed("BlamesTheProgram", lambda *_: fail(CollectiveMismatchError("the ranks disagree")))
Dies = _changed("Dies", lambda self, error, x: fail(SystemExit(7)))
OnlyTheFirstRankHears = _changed(
    "OnlyTheFirstRankHears", lambda self, error, x: torch.zeros_like(x) if self._rank else fail(error)
)


class StartsAlone(GlooBackend):
    def connect(self, group: Group, rank: int) -> Transport:
        made: Any = super().connect(group, rank)
        inner = made.start_all_reduce

        def start_all_reduce(x: torch.Tensor, op: Any, donate: bool) -> Pending:
            def wait() -> torch.Tensor:
                try:
                    return pending()
                except PeerLostError:
                    return x

            pending = inner(x, op, donate)
            return wait

        made.start_all_reduce = start_all_reduce
        return made


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
        (GoesOnAlone, "gone", "rank 2 is gone in all_reduce, and rank 0 got [1.0, 1.0, 1.0, "),
        (RaisesItsLibrarysError, "killed", "rank 2 got BrokenPipeError: [Errno 32] Broken pipe"),
        (BlamesTheProgram, "killed", "rank 2 got CollectiveMismatchError: the ranks disagree"),
        (NeedsItsLauncher, "gone", "set starts = False if a launcher has to start them"),
        (Dies, "killed", "rank 2 ended with status 7: start(timeout=5) promises PeerLostError"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_it_is_found(kind: type[GlooBackend], way: str, says: str) -> None:
    plan = Losses(kind, 200.0, 5.0, (way,), ("start_all_reduce" if kind is StartsAlone else "all_reduce",))
    found, other = run_ranks(Mesh({"tp": 2}), lambda ctx: lost(ctx, plan))
    assert other == []
    # the time-out is longer on a machine with other work
    assert says in re.sub(r"timeout=[\d.]+", "timeout=5", "\n".join(found))
    assert ("RuntimeError: start me with mpirun" in found[0]) == (kind is NeedsItsLauncher)


def test_the_first_way_that_is_wrong_is_the_last_that_is_tried() -> None:
    """Under a launcher the other ranks wait for the result as long as for any collective."""
    plan = Losses(RaisesItsLibrarysError, 200.0, 5.0, ("killed", "gone"), ("all_reduce",))
    found, _ = run_ranks(Mesh({"tp": 2}), lambda ctx: lost(ctx, plan))
    assert found
    assert all(" is killed in all_reduce" in finding for finding in found)
