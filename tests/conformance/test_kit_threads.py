"""The kit on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import tiers

from tpcore.layout.mesh import Mesh
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.conformance import Conformance
from tpcore.testing.kit.collectives import PRIMITIVES, differs, right_values
from tpcore.testing.kit.edges import full_float32


class TestThreads(Conformance):
    worlds = (2, 3, 4)
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


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_a_rank_alone_keeps_its_values(primitive: str) -> None:
    """A verification at tp=1 makes all calls, too."""
    assert run_ranks(Mesh({"tp": 1}), lambda ctx: right_values(ctx, primitive, torch.float32)) == [[]]


def test_bits_that_print_alike_are_told_apart() -> None:
    two = torch.tensor([1, 2], dtype=torch.uint8).view(torch.bool)
    said = "is True of bytes [2]... from element 1 on, not True of bytes [1]..."
    assert differs(two, torch.ones(2, dtype=torch.bool)) == said


@pytest.mark.parametrize("how", ["high", "medium"])
def test_a_lower_precision_of_matmuls_is_refused(how: str) -> None:
    """The flag alone: on a CPU without such units it changes no number."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(how)
        (found,) = run_ranks(Mesh({"tp": 1}), full_float32)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(found) == 1
    assert found[0].startswith("the precision of float32 matmuls is lowered on rank 0: of cuda it is 'tf32'")
    assert run_ranks(Mesh({"tp": 1}), full_float32) == [[]]
