"""The kit on processes: both roads of the cpu_gloo backend, and a backend of a few lines on its base."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tpcore_cpu_gloo import GlooBackend

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


class Tiny(GlooBackend):
    """Buffers that grow soon and hold little: nearly all goes in pieces."""

    buffers = (64, 256)


class TestShared(Conformance):
    backend = "cpu_gloo"
    worlds = (2, 4)
    every = 35

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, pool: RankPool) -> Run:
        return pool.run


class TestGloo(TestShared):
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, pool: RankPool) -> Run:
        return partial(pool.run, env={"TPCORE_SHM": "0"})


class TestPieces(TestShared):
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls) -> Iterator[Run]:
        with RankPool(4, backend=Tiny) as ranks:
            yield ranks.run


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
