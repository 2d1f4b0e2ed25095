"""A rank that is lost or stopped while it saves or loads: named on all others, at the end of a chain too."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.endings import STOPPED, end, names, on_open, waits_in_a_chain
from helpers.tiers import diagonal
from helpers.transports import GLOO, SHARED, OverRoad, each_road  # noqa: F401  a fixture

from tpcore import checkpoint
from tpcore.errors import CheckpointError, CollectiveTimeoutError, PeerLostError
from tpcore.layers import ColumnParallelLinear
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext

TP2, SQUARE = Mesh({"tp": 2}), Mesh({"dp": 2, "tp": 2})
HOW = ["killed", "fails", "leaves"]


ON_A_ROAD = pytest.mark.parametrize(("where", "pool"), [("save", GLOO), ("load", SHARED)], indirect=["pool"])


def quick(test: str, params: Mapping[str, Any]) -> bool:
    """Each end, place and road."""
    return diagonal(params, how=HOW, where=["save", "load"], pool=[GLOO, SHARED])


def _at_files(ctx: ParallelContext, how: str, where: str, folder: str) -> None:
    """A save or a load by all ranks, in which the last one ends."""
    model = ColumnParallelLinear(8, 16, gather_output=False)
    path = f"{folder}/checkpoint"
    if where == "load":
        checkpoint.save({"model": model.state_dict()}, path)
    if ctx.rank == ctx.mesh.size - 1:
        on_open(folder, lambda: end(how))
    if where == "load":
        checkpoint.load(path, model)
    else:  # each dp rank has a part to write
        checkpoint.save({"model": model.state_dict()}, path, share_writes=True)


@ON_A_ROAD
@pytest.mark.parametrize("how", HOW)
def test_all_of_four_learn_who_was_lost(pool: OverRoad, tmp_path: Path, how: str, where: str) -> None:
    outcomes = pool.outcomes(SQUARE, _at_files, how, where, str(tmp_path))
    for rank in (0, 1, 2):
        assert isinstance(outcomes[rank].error, PeerLostError)
        assert names(str(outcomes[rank].error), 3, how), outcomes[rank].error


def _chain(ctx: ParallelContext, where: str, folder: str, known: str) -> str:
    """Rank 3 raises in a file and ends. The others get its error and go on."""
    try:
        _at_files(ctx, "raises", where, folder)
        return "no error"
    except (OSError, RuntimeError, CheckpointError) as e:
        if ctx.rank == 3:
            raise
        if "rank 3: " not in str(e):
            return str(e)
    return waits_in_a_chain(ctx, known)


@ON_A_ROAD
def test_a_chain_ends_at_the_rank_that_raised(pool: OverRoad, tmp_path: Path, where: str) -> None:
    (tmp_path / "run").mkdir()
    outcomes = pool.outcomes(SQUARE, _chain, where, str(tmp_path / "run"), str(tmp_path / "known"))
    assert "disk on fire" in str(outcomes[3].error)
    for rank in (0, 1, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        assert re.match(r"rank 3 \(pid \d+ on .*\) raised \w+: .*disk on fire", outcomes[rank].value)


def _stopped(ctx: ParallelContext, where: str, folder: str) -> None:
    pids = ctx.world.all_gather(torch.tensor([os.getpid()]), 0).tolist()
    try:
        _at_files(ctx, STOPPED, where, folder)
    finally:
        if ctx.rank == 0:
            os.kill(pids[-1], signal.SIGCONT)


@ON_A_ROAD
def test_a_stopped_rank_is_named_as_stopped(pool: OverRoad, tmp_path: Path, where: str) -> None:
    for outcome in pool.outcomes(TP2, _stopped, where, str(tmp_path), timeout=5.0):
        assert isinstance(outcome.error, CollectiveTimeoutError)
        assert names(str(outcome.error), 1, STOPPED), outcome.error


def _stopped_in_the_background(ctx: ParallelContext, folder: str) -> None:
    pids = ctx.world.all_gather(torch.tensor([os.getpid()]), 0).tolist()
    halted = threading.Event()

    def stop() -> None:
        end(STOPPED)
        halted.set()

    if ctx.rank == 2:
        on_open(f"{folder}/.checkpoint.saving", stop)
    checkpoint.save({"w": torch.ones(3)}, f"{folder}/checkpoint", background=True)
    try:
        if ctx.rank == 2:
            halted.wait()  # stopped before it comes to wait for the others
        checkpoint.wait()
    finally:
        if ctx.rank == 0:
            os.kill(pids[2], signal.SIGCONT)


@pytest.mark.parametrize("pool", [GLOO], indirect=True)
def test_a_rank_that_is_stopped_in_a_save_in_the_background(pool: OverRoad, tmp_path: Path) -> None:
    tp3 = Mesh({"tp": 3})
    outcomes = pool.outcomes(tp3, _stopped_in_the_background, str(tmp_path), timeout=5.0)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, CollectiveTimeoutError)
        assert names(str(outcome.error), 2, STOPPED), outcome.error
