"""The kit on processes: the cpu_gloo backend, and a backend of a few lines on the base it shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tpcore.backend.interface import Backend
from tpcore.c10d.backend import C10dBackend
from tpcore.processes.pool import RankPool
from tpcore.testing.kit.conformance import Conformance, Run

pytestmark = [pytest.mark.xdist_group("kit"), pytest.mark.processes]


class Simple(C10dBackend):
    """All that another transport of torch.distributed needs."""

    interface = 2
    transport = "gloo"

    def device(self) -> torch.device:
        return torch.device("cpu")


class TestGloo(Conformance):
    backend = "cpu_gloo"
    worlds = (2, 4)
    every = 35

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, pool: RankPool) -> Run:
        return pool.run


class TestSimple(Conformance):
    worlds = (2,)
    every = 70

    def backend_class(self) -> type[Backend]:
        return Simple

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls) -> Iterator[Run]:
        with RankPool(2, backend=Simple) as ranks:
            yield ranks.run
