"""The kit on ranks as threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers.tiers import tiers
from torch import Tensor

from tpcore.comm.transport import Op
from tpcore.layout.mesh import Mesh
from tpcore.testing import ThreadBackend, matrix, run_ranks
from tpcore.testing.conformance import Conformance
from tpcore.testing.kit import drawn, training
from tpcore.testing.kit.collectives import PRIMITIVES, right_values
from tpcore.testing.kit.launched import told
from tpcore.testing.kit.programs import full_float32
from tpcore.testing.kit.rank import differs
from tpcore.testing.threads import ThreadTransport

SOME = (torch.float64, torch.bfloat16, torch.int64, torch.bool)


class TestThreads(Conformance):
    worlds = (2, 3, 4)
    starts = False  # threads of one process
    seed, one_in = 1, 20

    @staticmethod
    def quick(test: str, params: Mapping[str, Any]) -> bool:
        """All on two ranks but large tensors, which threads do not cut; on more too groups, layers, and values of some
        dtypes, since who comes first is the same for each."""
        many = any(mesh.size > 2 for mesh in params.values() if isinstance(mesh, Mesh))
        some = test in ("test_groups", "test_layers") or (test == "test_values" and params["dtype"] in SOME)
        return test != "test_large" and (not many or some)

    @classmethod
    def drill(cls, test: str, params: Mapping[str, Any]) -> bool:
        """Four ranks go by what two and three do: processes run all of it on four."""
        four = any(mesh.size > 3 for mesh in params.values() if isinstance(mesh, Mesh))
        return four and not cls.quick(test, params)

    def backend_class(self) -> type[ThreadBackend]:
        return ThreadBackend

    def choices(self) -> dict[str, list[Any]]:
        """Layers in one precision: tests/core/layers/test_layers_matrix.py runs all of these cases on threads."""
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


@pytest.mark.parametrize("tp", [3, 5, 6, 7])
def test_any_number_of_ranks_is_right(tp: int) -> None:
    """Where a third of a gradient, or a chunk, is no round number."""

    def check(ctx: Any) -> list[str]:
        rows = [case for layer in ("column blocks", "qkv") for case in matrix.cases(layer, "fp64")[::3]]
        return [*matrix.run(ctx, rows), *drawn.under_way(ctx, 1, 10, 1 << 13, ())]

    assert run_ranks(Mesh({"tp": tp}), check) == [[]] * tp


MESHES = [
    *({"dp": 1, "tp": 1}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}),
    *({"dp": 1, "ep": 2, "cp": 2, "tp": 1}, {"pp": 2, "ep": 2, "cp": 1, "tp": 1}),
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_steps_equal_the_plain_models(axes: dict[str, int]) -> None:
    """Over all axes over which examples, tokens or layers are sharded."""
    steps = training.pipeline_steps if "pp" in axes else training.training_steps
    for found in run_ranks(Mesh(axes), steps):
        assert found == []
        assert 0 < found.error < found.allowed


class Forgets(ThreadTransport):
    """The sum of every third all-reduce."""

    calls = 0

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        self.calls += 1
        out = super().all_reduce(x, op, donate)
        return x.detach().clone() if self.calls % 3 == 0 else out


def made_with(transport: type[ThreadTransport]) -> type[ThreadBackend]:
    connect = lambda self, group, rank: transport(group, rank, self._world)  # noqa: E731
    return type("Wrong", (ThreadBackend,), {"connect": connect})


@pytest.mark.parametrize("axes", MESHES[1:3], ids=str)
def test_steps_with_a_wrong_sum_differ(axes: dict[str, int]) -> None:
    for found in run_ranks(Mesh(axes), training.training_steps, backend=made_with(Forgets)):
        assert len(found) > 4
        assert not found.error <= found.allowed


def zeros(self: ThreadTransport, x: Tensor, *arguments: Any) -> Tensor:
    return torch.zeros(1)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_what_ranks_find_arrives_if_one_collective_is_right(count: int) -> None:
    names = ("all_gather", "all_reduce", "reduce_scatter")[:count]
    backend = made_with(type("Zeros", (ThreadTransport,), dict.fromkeys(names, zeros)))
    mine = [["a finding"], ["b" * 9000, *["c" * 500] * 30]]
    first, second = run_ranks(Mesh({"tp": 2}), lambda ctx: told(mine[ctx.rank], ctx.comm("tp")), backend=backend)
    assert first[0] == ["a finding"]
    assert second[1][0] == "b" * 1024
    assert second[1][-1] == "and more"
    if count < 3:
        assert first == second
    else:
        assert first[1] == [
            "rank 1: its messages did not arrive: " + ", ".join(names[:2]) + f" and {names[2]} are all wrong"
        ]


def test_a_message_may_name_a_file_whose_bytes_are_no_text() -> None:
    assert run_ranks(Mesh({"tp": 1}), lambda ctx: told([os.fsdecode(b"/tmp/\xff")], ctx.world)) == [[["/tmp/\\udcff"]]]


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
