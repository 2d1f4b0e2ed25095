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
from typing import Any, ClassVar

from ..errors import extra
from ..layout.mesh import Mesh
from .kit.contract import Contract, Run
from .kit.launched import Launched

with extra("testing", __name__):
    import pytest

__all__ = ["Conformance"]


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

    grace: ClassVar[float] = 10.0
    """Seconds after which a rank that failed alone ends the job (see ``Launched``)."""

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, request: pytest.FixtureRequest) -> Iterator[Run]:
        """Runs a check on all ranks; override it for a backend that needs no launcher."""
        capture = request.config.pluginmanager.get_plugin("capturemanager")

        def say(message: str) -> None:
            if capture is not None:
                capture.suspend_global_capture()
            sys.stderr.write(message)
            sys.stderr.flush()

        job = Launched(cls.backend, grace=cls.grace, say=say)
        if job.rank:
            _leave_printing_to_rank_0(request.config, job.rank)
        yield job.run
        job.close()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        choices = self.choices()
        for name in reversed([n for n in choices if n in metafunc.fixturenames]):
            metafunc.parametrize(name, choices[name], ids=_label)
