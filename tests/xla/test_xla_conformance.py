"""The conformance kit on replicas: what every backend must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tpcore_neuron.testing import run_replicas

from tpcore.backend.registry import load_backend
from tpcore.context import ParallelContext, use
from tpcore.mesh import Mesh
from tpcore.testing.kit.conformance import Conformance


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
    every = 61  # test_xla_matrix runs many more of them
    # torch_xla adds a token, zero, to the input of a collective; XLA's maximum over CPUs leaves out NaN
    loses = ("the sign of zero", "NaN in a maximum")

    def choices(self) -> dict[str, list[Any]]:
        """Layers not in float64: XLA's exp and erf are good to 1e-9 there, and the bounds ask for 1e-15."""
        found = super().choices()
        return found | {"precision": [name for name in found["precision"] if name != "fp64"]}

    @pytest.fixture(autouse=True)
    def cpu_in_place_of_a_core(self, monkeypatch):
        monkeypatch.setenv("PJRT_DEVICE", "CPU")

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls):
        return lambda mesh, fn, *args: run_replicas(one_rank, mesh.size, dict(mesh.axes), fn, args)
