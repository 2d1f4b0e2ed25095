"""The BERT step of ``tpcore verify``: right on a right backend, wrong else."""

from __future__ import annotations

import pytest
from torch import Tensor

from tpcore.layout.mesh import Mesh
from tpcore.testing import ThreadBackend, run_ranks
from tpcore.testing.threads import ThreadTransport
from tpcore.testing.verify import bert

MESHES = [{"dp": 1, "tp": 1}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}]


@pytest.mark.parametrize("axes", MESHES)
def test_a_right_backend(axes: dict[str, int]) -> None:
    for found in run_ranks(Mesh(axes), bert.training_steps):
        assert found == []
        assert 0 < found.error < found.allowed


class Forgets(ThreadTransport):
    """The sum of every third all-reduce."""

    calls = 0

    def all_reduce(self, x: Tensor, op: str, donate: bool) -> Tensor:
        self.calls += 1
        out = super().all_reduce(x, op, donate)
        return x.detach().clone() if self.calls % 3 == 0 else out


class Wrong(ThreadBackend):
    def connect(self, group, rank):
        return Forgets(group, rank, self._world)


@pytest.mark.parametrize("axes", MESHES[1:])
def test_a_wrong_backend(axes: dict[str, int]) -> None:
    for found in run_ranks(Mesh(axes), bert.training_steps, backend=Wrong):
        assert len(found) > 4
        assert not found.error <= found.allowed
