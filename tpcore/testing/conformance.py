"""The conformance kit: tests that every backend must pass; pytest collects them from one subclass.

    from tpcore.testing.conformance import Conformance

    class TestMine(Conformance):
        backend = "mine"

Start pytest with the backend's launcher (``mpirun -n 4 python -m pytest``, ``torchrun --nproc_per_node=4
-m pytest``): every rank runs every test. The order is from simple to composed: the first failure shows the
fault, and later ones are often its consequence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from ..errors import extra
from ..layout.mesh import Mesh
from .kit.contract import Contract, Run
from .kit.launched import Launched

with extra("testing", __name__):
    import pytest

__all__ = ["Conformance"]

LONG = ("test_large", "test_many", "test_freed", "test_lost_ranks", "test_layers", "test_traces")
"""The tests that ``--kit-quick`` leaves out."""


def _label(value: Any) -> str:
    if isinstance(value, Mesh):
        return "x".join(f"{k}{v}" for k, v in value.axes.items())
    return str(value).removeprefix("torch.").replace(" ", "-")


def _leave_printing_to_rank_0(config: pytest.Config, rank: int) -> None:
    """Silence pytest on this rank: rank 0 has all ranks' messages. The exit status stays each rank's own."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"rank {rank} prints no more: rank 0 prints what all ranks find")
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115  for the rest of the program


class Conformance(Contract):
    """Subclass it in a test file and set ``backend``. A class whose ``run`` fixture starts its own ranks sets
    ``worlds``."""

    @pytest.fixture(autouse=True)
    def _quick(self, request: pytest.FixtureRequest) -> None:
        """With ``--kit-quick`` one in twenty of the calls that are drawn, and none of the tests that take long."""
        if request.config.getoption("kit_quick", False):
            if request.node.originalname in LONG:
                pytest.skip("--kit-quick: this test takes long")
            vars(self).update(one_in=20 * self.one_in, calls=200, large=self.large[:1])

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, request: pytest.FixtureRequest) -> Iterator[Run]:
        """Runs a check on all ranks; override it for a backend that needs no launcher."""
        capture = request.config.pluginmanager.get_plugin("capturemanager")

        def say(message: str) -> None:
            with nullcontext() if capture is None else capture.global_and_fixture_disabled():
                sys.stderr.write(message)
                sys.stderr.flush()

        job = Launched(cls.backend, cls.timeout, say)
        seed = request.config.getoption("kit_seed", None)
        cls.seed = job.seed(cls.seed if seed is None else seed)
        if job.rank == 0:
            say(f"\nthe kit draws calls with seed {cls.seed}: --kit-seed={cls.seed} draws them again\n")
        if job.rank:
            _leave_printing_to_rank_0(request.config, job.rank)
        yield job.run
        job.close()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        choices = self.choices()
        for name in reversed([n for n in choices if n in metafunc.fixturenames]):
            metafunc.parametrize(name, choices[name], ids=_label)
