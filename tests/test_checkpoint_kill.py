"""A saving rank is killed at each of its steps on the file system, by SIGKILL, one process a step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from killing import killed, state

from tpcore.checkpoint import load, save
from tpcore.context import ParallelContext
from tpcore.errors import CheckpointError, PeerLostError
from tpcore.mesh import Mesh
from tpcore.processes.pool import RankPool
from tpcore.testing import run_ranks

TP = 2


def versions(path: Path) -> int:
    """The version that is there, all of it the same, on all ranks."""
    found: list[int] = []

    def read(ctx: ParallelContext) -> None:
        there = load(path)
        assert float(there["model"]["w"].sum()) == 3 * there["n"]
        assert there["more"]["v"].tolist() == [ctx.rank, there["n"]]
        found.append(there["n"])

    run_ranks(Mesh({"tp": TP}), read)
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["first", "exchange", "two renames", "async"])
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_every_step(
    how: str, victim: int, pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each the previous or the new checkpoint is there, whole, and the next save clears up."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # here, not in what is killed
    mesh = Mesh({"tp": TP})
    run_ranks(mesh, lambda ctx: save(state(ctx, 1), tmp_path / "old"))
    home, seen, stop = tmp_path / "home", set(), 0
    while True:
        stop += 1
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        if how != "first":
            shutil.copytree(tmp_path / "old", home / "c")
        outcomes = pool.outcomes(mesh, killed, str(home), how, victim, stop)
        if outcomes[victim].error is None:
            break
        assert isinstance(outcomes[victim].error, PeerLostError)  # and nobody waits for it
        try:
            seen.add(versions(home / "c"))
        except CheckpointError:
            assert how == "first"  # where nothing was before there may be nothing, but not half of it
            assert not (home / "c").exists()
    assert outcomes[victim].value < stop
    assert versions(home / "c") == 2
    assert os.listdir(home) == ["c"]
    assert stop > (25 if victim == 0 else 7)
    if victim == 0:  # rank 0 puts it in place
        assert seen == ({2} if how == "first" else {1, 2})
    elif how == "async":  # rank 0 may put it in place while this rank, its part written, lets go of its locks
        assert seen <= {1, 2}
        assert 1 in seen
    else:
        assert seen <= {1}
