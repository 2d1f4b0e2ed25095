"""The kit on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiers import tiers

from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.conformance import Conformance


class TestThreads(Conformance):
    worlds = (2, 4)
    starts = False  # threads of one process

    def backend_class(self) -> type[ThreadBackend]:
        return ThreadBackend

    def choices(self) -> dict[str, list[Any]]:
        """Layers in one precision: tests/test_layers_matrix.py runs all of these cases on threads."""
        found = super().choices()
        return found | {"precision": tiers(["fp32"], drill=found["precision"])}

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls) -> Callable[..., Any]:
        return lambda mesh, fn, *args: run_ranks(mesh, lambda ctx: fn(ctx, *args))
