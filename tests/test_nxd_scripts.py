"""Whole scripts that import ``neuronx_distributed``, over gloo in processes: one loss at every degree."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool

from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

SCRIPTS = str(Path(__file__).parent / "scripts")


def bert(ctx: ParallelContext, scripts: str, folder: str, resume: bool) -> list[float]:
    """The script's ``train`` on this rank, imported as it stands."""
    sys.path.insert(0, scripts)
    try:
        from nxd_imports import installed  # type: ignore[import-not-found]

        installed()
        import nxd_bert  # type: ignore[import-not-found]
    finally:
        sys.path.remove(scripts)
    flags = Namespace(output_dir=folder, steps=3, lr=0.01, resume=resume, tensor_parallel_size=0)
    losses: list[float] = nxd_bert.train(flags)
    return losses


def mesh(tp: int = 1, dp: int = 1) -> Mesh:
    return Mesh({"pp": 1, "dp": dp, "tp": tp})


def test_a_bert_script_trains_saves_beside_its_logs_and_resumes(pool: RankPool, tmp_path: Path) -> None:
    def alone(resume: bool) -> Any:
        return run_ranks(mesh(), lambda ctx: bert(ctx, SCRIPTS, str(tmp_path / "alone"), resume))[0]

    first, second = alone(False), alone(True)
    assert first[0] > first[-1]
    for name, on in (("tp", mesh(tp=2)), ("both", mesh(tp=2, dp=2))):
        folder = str(tmp_path / name)
        for resume, want in ((False, first), (True, second)):
            for got in pool.run(on, bert, SCRIPTS, folder, resume):
                assert got == pytest.approx(want, rel=2e-4)  # float32, sums in other orders
        assert (tmp_path / name / "events.log").read_text().count("\n") == 2 * on.size
