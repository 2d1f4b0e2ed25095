"""The kit on processes: both roads of the cpu_gloo backend, and a backend of a few lines on its base.

The first has every dtype. The others have samples, and all with the drills: a road moves bytes and sums, and
tests/backends has every dtype on both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import drills
import pytest
import torch
from tpcore_cpu_gloo import GlooBackend

from tpcore.backend.interface import Backend
from tpcore.c10d.backend import C10dBackend
from tpcore.processes.pool import RankPool, Standing
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
    tested: ClassVar[str | type[Backend]] = "cpu_gloo"
    env: ClassVar[Mapping[str, str]] = {}
    worlds = (2, 4)
    patience = 200.0  # beside other work
    every = 35

    def choices(self) -> dict[str, list[Any]]:
        """Layers in one precision: tests/test_layers_matrix.py runs more of them, in all, on processes."""
        found = super().choices()
        return found | {"precision": drills.sample(found["precision"], ["fp32"])}

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls) -> Iterator[Run]:
        """Each world is one job for all tests: to start one costs more than most of them do."""
        with ExitStack() as stack:
            jobs: dict[int, Standing] = {}
            for size in cls.worlds:
                ranks = stack.enter_context(RankPool(size, backend=cls.tested))
                jobs[size] = ranks.standing(size, env=cls.env)
            yield lambda mesh, fn, *args: jobs[mesh.size].run(mesh, fn, *args)


class Sampled(TestShared):
    def choices(self) -> dict[str, list[Any]]:
        found = super().choices()
        some = [torch.float64, torch.bfloat16, torch.bool]  # float32 is in all other tests
        assert set(some) <= set(found["dtype"])
        return found | {
            "dtype": drills.sample(found["dtype"], some),
            "moved": drills.sample(found["moved"], found["moved"][:1]),
        }


class TestGloo(Sampled):
    env: ClassVar[Mapping[str, str]] = {"TPCORE_SHM": "0"}


class TestPieces(Sampled):
    tested = Tiny
    large = (1_027,)  # 17 pieces: 16 MB would be 65,536

    starts = False  # as Shared

    def test_freed(self) -> None:  # type: ignore[override]
        pytest.skip("256 KB in pieces of 256 bytes, a thousand times, take minutes")


class TestSimple(Sampled):
    tested = Simple
    worlds = (2,)
    every = 70

    def backend_class(self) -> type[Backend]:
        return Simple
