"""The conformance kit and the correctness matrix on replicas, with the cases and checks of threads and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tiers import tiers
from onreplicas import on_replicas

from tpcore.backend.registry import load_backend
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext, use
from tpcore.testing import matrix
from tpcore.testing.conformance import Conformance
from tpcore.testing.kit.contract import Run
from tpcore_neuron.testing import run_replicas


def one_rank(axes: dict[str, int], fn: Callable[..., list[str]], args: tuple[Any, ...]) -> list[str]:
    backend = load_backend("neuron")
    rank, _ = backend.start(60.0)
    with use(ParallelContext(backend, Mesh(axes), rank)) as ctx:
        found = fn(ctx, *args)
        backend.mark_step()
    backend.stop()
    return found


class TestNeuron(Conformance):
    backend = "neuron"
    worlds = (4,)
    starts, seed = False, 1  # replicas of one process; one seed, so that a change of the product alone turns it red
    every = 61  # the matrix below has many more of them
    # torch_xla adds a token, zero, to the input of a collective; XLA's maximum over CPUs leaves out NaN
    loses = ("the sign of zero", "NaN in a maximum")

    def choices(self) -> dict[str, list[Any]]:
        """Layers not in float64: XLA's exp and erf are good to 1e-9 there, and the bounds ask for 1e-15.

        Each distinct call compiles a program. So what the matrix tests too, the other precisions, is left
        to the drills here, and so are dtypes that differ in their width alone.
        """
        found = super().choices()
        layers = [name for name in found["precision"] if name != "fp64"]
        grid = [Mesh({"dp": 2, "tp": 2}), Mesh({"pp": 2, "dp": 1, "tp": 2})]
        assert all(mesh in found["grid"] for mesh in grid)
        some = [torch.bfloat16, torch.int64, torch.bool]  # float32 is in all other tests
        assert set(some) <= set(found["dtype"])
        return found | {
            "dtype": tiers(some, drill=found["dtype"]),
            "grid": tiers(grid, drill=found["grid"]),
            "precision": tiers(["fp16"], drill=layers),
        }

    @pytest.fixture(autouse=True)
    def cpu_in_place_of_a_core(self, monkeypatch):
        monkeypatch.setenv("PJRT_DEVICE", "CPU")

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls):
        return lambda mesh, fn, *args: run_replicas(one_rank, mesh.size, dict(mesh.axes), fn, args)

    def test_layers(self, run: Run, line: Mesh, layer: str, precision: str) -> None:
        """A seventh of the layers with few cases too, of which the kit takes all."""
        some = matrix.cases(layer, precision)
        self._check(run(line, matrix.run, some[:: self.every if len(some) > 20 else 7]))


# -- the matrix ---------------------------------------------------------------------------------------------
DTYPES = ("fp32", "bf16")
POINTS = [(layer, tp, dtype) for tp in (2, 4) for dtype in DTYPES for layer in matrix.AXES]
SAMPLE, FULL = (17, 7), (5, 1)  # one of so many cases, and where there are few


def some(layer: str, tp: int, dtype: str, strides: tuple[int, int]) -> list[matrix.Case]:
    """Every 17th, or of few every 7th, since each compiles programs of its own. Each tp and dtype begins
    elsewhere, and the strides share no factor with the length of an axis: the four meet all values."""
    found = [c for c in matrix.cases(layer, dtype) if ("mode", "sparse") not in c.options]
    stride = strides[len(found) <= 20]
    first = DTYPES.index(dtype) + len(DTYPES) * (tp > 2)
    return found[first % stride :: stride]


@pytest.mark.parametrize(
    ("layer", "tp", "dtype", "strides"), tiers([(*p, SAMPLE) for p in POINTS], drill=[(*p, FULL) for p in POINTS])
)
def test_equals_the_plain_module(layer, tp, dtype, strides):
    matrix.report(on_replicas(tp, tp, matrix.run, some(layer, tp, dtype, strides)))
