"""Ranks that are processes die in a save or a load, or are killed by SIGKILL at a save's steps on the file system.

The slow tests take the first step, the last and some between them, others for each of three ways, and rank 1 in one
way only, for rank 0 puts a checkpoint in place. The drills take each. ``test_checkpoint_crash`` takes each in threads.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from killing import killed, state, version
from rank_pool import RankPool
from tiers import tiers

from tpcore.checkpoint import load, save, stored
from tpcore.checkpoint.write import save as writing
from tpcore.errors import CheckpointError, PeerLostError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

TP = 2
WAYS = ["first", "exchange", "no exchange", "async"]
KILLED = [(victim, how) for victim in (0, 1) for how in WAYS]


def stops(steps: int, way: int, each: bool) -> list[int]:
    """At which steps to kill."""
    stride = 1 if each else max(2, steps // 2)
    return sorted({1, steps - 2, steps, *range(2 + way % stride, steps, stride)})


def prepared(home: Path, old: Path, how: str) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    if how != "first":
        shutil.copytree(old, home / "c")


@pytest.mark.parametrize(
    ("victim", "how", "each"),
    tiers(
        [],
        [(*point, False) for point in [(0, "first"), (0, "exchange"), (1, "async")]],
        [(*point, True) for point in KILLED],
    ),
)
def test_killed_at_a_step(
    how: str, victim: int, each: bool, pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each the previous or the new checkpoint is there, whole, and the next save clears up."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # here, not in what is killed
    mesh = Mesh({"tp": TP})
    run_ranks(mesh, lambda ctx: save(state(ctx, 1), tmp_path / "old"))
    home, seen = tmp_path / "home", set()
    prepared(home, tmp_path / "old", how)
    steps = pool.run(mesh, killed, str(home), how, victim, 0)[victim]
    assert version(home / "c") == 2
    assert os.listdir(home) == ["c"]
    assert steps > (25 if victim == 0 else 6)
    for stop in stops(steps, WAYS.index(how), each):
        prepared(home, tmp_path / "old", how)
        outcomes = pool.outcomes(mesh, killed, str(home), how, victim, stop)
        if outcomes[victim].error is None:
            assert stop > steps - 3  # the first save of a process takes some steps more
            continue
        assert isinstance(outcomes[victim].error, PeerLostError)  # and nobody waits for it
        try:
            seen.add(version(home / "c"))
        except CheckpointError:
            assert how == "first"  # where nothing was before there may be nothing, but not half of it
            assert not (home / "c").exists()
    pool.run(mesh, killed, str(home), how, victim, 0)
    assert version(home / "c") == 2
    assert os.listdir(home) == ["c"]
    if victim == 0:  # rank 0 puts it in place
        assert seen == ({2} if how == "first" else {1, 2})
    elif how == "async":  # rank 0 may put it in place while this rank, its part written, lets go of its locks
        assert seen <= {1, 2}
        assert 1 in seen
    else:
        assert seen <= {1}


# -- a rank that ends by itself ---------------------------------------------------------------------------
MESH = Mesh({"dp": 2, "tp": TP})


def _save(ctx: ParallelContext, path: str, version: int) -> None:
    save(state(ctx, version), path)


def _save_and_die(ctx: ParallelContext, path: str) -> None:
    if ctx.rank == 0:
        writing.write_tensors = lambda *args: os._exit(7)  # type: ignore[attr-defined]
    _save(ctx, path, 6)


def test_a_rank_dies_in_a_save(pool: RankPool, tmp_path: Path) -> None:
    """The others hear of it, the previous checkpoint is whole, and the next save clears up."""
    path = tmp_path / "c"
    pool.run(MESH, _save, str(path), 5)
    for outcome in pool.outcomes(MESH, _save_and_die, str(path)):
        assert isinstance(outcome.error, PeerLostError)  # and not CollectiveTimeoutError
    assert version(path) == 5
    pool.run(MESH, _save, str(path), 7)
    assert version(path) == 7
    assert os.listdir(tmp_path) == ["c"]


def _load_and_die(ctx: ParallelContext, path: str) -> None:
    if ctx.rank == 3:
        stored.ReadPlan.fill = lambda self, *_, **__: os._exit(7)  # type: ignore[method-assign]
    load(path)


def test_a_rank_dies_in_a_load(pool: RankPool, tmp_path: Path) -> None:
    pool.run(MESH, _save, str(tmp_path / "c"), 5)
    for outcome in pool.outcomes(MESH, _load_and_die, str(tmp_path / "c")):
        assert isinstance(outcome.error, PeerLostError)
