"""The kit on processes: both roads of the cpu_gloo backend, and cuda's.

What the roads share, the kit on threads tests for all of them. `make test` runs here what a road does
itself: it moves bytes and sums, in pieces and in groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
import torch
from helpers.cuda_on_cpu import StandIn
from helpers.rank_pool import RankPool
from helpers.tiers import tiers

from tpcore.backend.interface import Backend
from tpcore.backend.registry import backend_class
from tpcore.layout.mesh import Mesh
from tpcore.testing.conformance import Conformance
from tpcore.testing.kit.contract import Run
from tpcore_cpu_gloo import GlooBackend

pytestmark = [pytest.mark.xdist_group("kit"), pytest.mark.processes]


class Tiny(GlooBackend):
    """Buffers that grow soon and hold little: nearly all goes in pieces."""

    buffers = (64, 256)


class TestShared(Conformance):
    backend = "cpu_gloo"
    tested: ClassVar[str | type[Backend]] = "cpu_gloo"
    env: ClassVar[Mapping[str, str]] = {}
    worlds = (2, 4)
    timeout = 200.0  # beside other work
    every = 35
    seed, one_in = 1, 40

    @staticmethod
    def quick(test: str, params: Mapping[str, Any]) -> bool:
        """All on two ranks but the jobs with lost ranks; values of some dtypes on four."""
        two = all(mesh.size == 2 for mesh in params.values() if isinstance(mesh, Mesh))
        some = test == "test_values" and params["dtype"] in (torch.float64, torch.bfloat16, torch.int64, torch.bool)
        return some or (two and test != "test_lost_ranks")

    def backend_class(self) -> type[Backend]:
        return backend_class(self.tested) if isinstance(self.tested, str) else self.tested

    def choices(self) -> dict[str, list[Any]]:
        """Layers in one precision: tests/core/layers/test_layers_matrix.py runs more of them, in all, on processes."""
        found = super().choices()
        return found | {"precision": tiers(["fp32"], drill=found["precision"])}

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls) -> Iterator[Run]:
        """Each world is one job for all tests: to start one costs more than most of them do."""
        with ExitStack() as stack:
            pools = {n: stack.enter_context(RankPool(n, cls.timeout, cls.tested)) for n in cls.worlds}
            yield lambda mesh, fn, *args: pools[mesh.size].run(mesh, fn, *args, env=cls.env, stay=True)


class Sampled(TestShared):
    """All but values on four ranks, and what `whole` does not name, are drills: TestShared runs them."""

    whole: ClassVar[tuple[str, ...]] = ("test_layers", "test_lost_ranks", "test_checkpoint", "test_random_streams")

    def choices(self) -> dict[str, list[Any]]:
        found = super().choices()
        some = [torch.float64, torch.bfloat16, torch.bool]  # float32 is in all other tests
        assert set(some) <= set(found["dtype"])
        return found | {
            "dtype": tiers(some, drill=found["dtype"]),
            "moved": tiers(found["moved"][:1], drill=found["moved"]),
        }

    @classmethod
    def drill(cls, test: str, params: Mapping[str, Any]) -> bool:
        if test in cls.whole:
            return True
        four = any(mesh.size > 2 for mesh in params.values() if isinstance(mesh, Mesh))
        return four and test != "test_values"


def on_some_ranks(params: Mapping[str, Any]) -> bool:
    """Any dtype on two ranks, and one on four: order and dtypes together are TestShared's."""
    return params["dtype"] is torch.float64 or all(m.size == 2 for m in params.values() if isinstance(m, Mesh))


class TestGloo(Sampled):
    env: ClassVar[Mapping[str, str]] = {"TPCORE_SHM": "0"}

    @staticmethod
    def quick(test: str, params: Mapping[str, Any]) -> bool:
        return test in ("test_groups", "test_overlap") or (test == "test_values" and on_some_ranks(params))

    @classmethod
    def drill(cls, test: str, params: Mapping[str, Any]) -> bool:
        return test != "test_groups" and super().drill(test, params)


class TestPieces(Sampled):
    tested = Tiny
    large = (1_027,)  # 17 pieces: 16 MB would be 65,536
    most = 1_027
    starts = False  # as Shared

    @staticmethod
    def quick(test: str, params: Mapping[str, Any]) -> bool:
        return test == "test_large" or (test == "test_values" and on_some_ranks(params))

    def test_freed(self) -> None:  # type: ignore[override]
        pytest.skip("256 KB in pieces of 256 bytes, a thousand times, take minutes")


class TestCuda(Sampled):
    tested = StandIn

    @staticmethod
    def quick(test: str, params: Mapping[str, Any]) -> bool:
        some = ("test_joined", "test_layers", "test_random_streams")
        return test in some and TestShared.quick(test, params)

    @classmethod
    def drill(cls, test: str, params: Mapping[str, Any]) -> bool:
        """TestGloo moves the same bytes by the same calls; what is waited for, and when, is this backend's own."""
        if cls.quick(test, params):
            return False
        kept = "any_call under_way large overlap many training pipeline traces declaration"
        return test.removeprefix("test_") not in kept.split() or super().drill(test, params)
