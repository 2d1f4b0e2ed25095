"""Models traced for neuron: one HLO program for all ranks, run on replicas, against the unsharded model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tpcore_neuron.testing import programs, run_replicas

import tpcore
from tpcore.trace import TensorParallelModel
from tpcore.trace.artifact import Manifest, opened
from tpcore.trace.published import _call, _size
from tpcore.trace.tracing import Order, Traced, assembled, trace_rank
from tpcore.trace.worker import Rank

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from models import Encoder, batch, differences


class OnReplicas:
    """Answers for ``Workers``, with a run of replicas for every call."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest, self.weights = folder, manifest, folder
        self.running, self.failed = True, False

    def call(self, program: int, inputs: Sequence[torch.Tensor], timeout: float | None) -> list[torch.Tensor]:
        every = run_replicas(serve, self._manifest.tp, self._folder, [(program, list(inputs))])
        return every[0][0]

    def close(self) -> None:
        self.running = False


def serve(folder: Path, calls: Sequence[tuple[int, list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
    manifest = opened(folder)
    rank = Rank(tpcore.init(manifest.backend, manifest.tp), folder, manifest, folder)
    return [rank.run(program, inputs) for program, inputs in calls]


def traced(
    folder: Path, func: Callable[[], Any], inputs: Any, tp: int, *, bucket_inputs: Sequence[Any] = (), **more: Any
) -> TensorParallelModel:
    calls = sorted((_call(e) for e in (inputs, *bucket_inputs)), key=_size)
    order = Order(func, calls, more.get("dynamic_shapes"), "neuron", tp, None, folder)
    manifest = assembled(order, run_replicas(trace_rank, tp, order), 0)
    return TensorParallelModel(folder, manifest, workers=OnReplicas(folder, manifest))


def make() -> Encoder:
    return Encoder(True, dtype=torch.float32)


@pytest.mark.parametrize("tp", [pytest.param(2, id="n2"), pytest.param(4, id="n4")])
def test_equals_the_unsharded_model(tp, tmp_path):
    model = traced(tmp_path, make, batch(2, 8), tp, bucket_inputs=[batch(4, 12)])
    plain = Encoder(False, dtype=torch.float32)
    for rows, length in ((2, 8), (4, 12), (3, 9)):
        ids, mask = batch(rows, length)
        got, want = model(ids, mask), plain(ids, mask)
        # float32 sums in another order
        assert differences(got, {k: v.detach() for k, v in want.items()}) < 1e-5
