"""The kit's jobs in which a rank is lost find backends that say nothing, or the wrong thing."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tpcore_cpu_gloo import GlooBackend

from tpcore.errors import CollectiveMismatchError, PeerLostError
from tpcore.mesh import Group, Mesh
from tpcore.testing import run_ranks
from tpcore.testing.kit.lost import TIMEOUT, lost
from tpcore.transport import Transport

pytestmark = pytest.mark.processes


class HasNoTimeout(GlooBackend):
    def start(self, timeout: float) -> tuple[int, int]:
        return super().start(1e6)


class _Changed(GlooBackend):
    """What a rank gets that waits for a lost one is changed."""

    def instead(self, error: PeerLostError, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

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


class HangsWithTheLostRank(_Changed):
    def instead(self, error: PeerLostError, x: torch.Tensor) -> torch.Tensor:
        time.sleep(1e6)
        return x


class GoesOnAlone(_Changed):
    def instead(self, error: PeerLostError, x: torch.Tensor) -> torch.Tensor:
        return x


class RaisesItsLibrarysError(_Changed):
    def instead(self, error: PeerLostError, x: torch.Tensor) -> torch.Tensor:
        raise OSError(32, "Broken pipe")


class BlamesTheProgram(_Changed):
    def instead(self, error: PeerLostError, x: torch.Tensor) -> torch.Tensor:
        raise CollectiveMismatchError("the ranks disagree")


class Dies(_Changed):
    def instead(self, error: PeerLostError, x: torch.Tensor) -> torch.Tensor:
        raise SystemExit(7)


class NeedsItsLauncher(GlooBackend):
    def start(self, timeout: float) -> tuple[int, int]:
        raise RuntimeError("start me with mpirun")


@pytest.mark.parametrize(
    ("kind", "way", "says"),
    [
        (HasNoTimeout, "late", "rank 1 is late, and rank 0 waits for ever: start(timeout=5) promises"),
        (HangsWithTheLostRank, "killed", "rank 1 is killed, and rank 0 waits for ever"),
        (GoesOnAlone, "gone", "rank 1 is gone, and rank 0 got [1.0, 1.0, 1.0, 1.0] from it"),
        (RaisesItsLibrarysError, "killed", "rank 0 got BrokenPipeError: [Errno 32] Broken pipe"),
        (BlamesTheProgram, "killed", "rank 0 got CollectiveMismatchError: the ranks disagree"),
        (NeedsItsLauncher, "gone", "set starts = False if a launcher has to start them"),
        (Dies, "killed", "rank 0 ended with status 7: start(timeout=5) promises PeerLostError"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_it_is_found(kind: type[GlooBackend], way: str, says: str) -> None:
    (found, other) = run_ranks(Mesh({"tp": 2}), lambda ctx: lost(ctx, kind, way, 200.0, slack=5.0))
    assert len(found) == 1
    assert says in found[0]
    assert ("RuntimeError: start me with mpirun" in found[0]) == (kind is NeedsItsLauncher)
    assert other == []


SLOW = """
import os, time
from tpcore_cpu_gloo import GlooBackend

class Slow(GlooBackend):
    pass

if os.environ.get("RANK") == "1":
    time.sleep({seconds})
"""


def test_a_rank_that_imports_longer_than_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out of these jobs is of their collectives, and not of their start."""
    (tmp_path / "slow_to_import.py").write_text(SLOW.format(seconds=TIMEOUT + 3))
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("slow_to_import").Slow
    assert run_ranks(Mesh({"tp": 2}), lambda ctx: lost(ctx, kind, "gone", 200.0)) == [[], []]
