"""The programs of the testing kit on meshes with all axes over which examples or tokens are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tpcore import Mesh, ParallelContext
from tpcore.testing import run_ranks
from tpcore.testing.kit import programs, stages
from tpcore.testing.verify import bert

PROGRAMS: dict[str, tuple[Callable[[ParallelContext], Any], dict[str, int]]] = {
    "step": (programs.training_step, {"dp": 1, "ep": 2, "cp": 2, "tp": 1}),
    "pipeline": (stages.pipeline_step, {"pp": 2, "ep": 2, "cp": 1, "tp": 1}),
    "bert": (bert.training_steps, {"dp": 1, "ep": 2, "cp": 2, "tp": 1}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_the_plain_module(name: str) -> None:
    program, mesh = PROGRAMS[name]
    for wrong in run_ranks(Mesh(mesh), program):
        assert not wrong
