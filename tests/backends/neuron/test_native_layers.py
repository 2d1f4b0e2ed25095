"""Layers and primitives of the native neuron backend over plain gloo: all of it but the calls of the device."""

from __future__ import annotations

import pytest
import torch

import tpcore
from tpcore.c10d.backend import C10dBackend
from tpcore.testing import matrix
from tpcore.testing.kit import collectives
from tpcore.testing.kit.samples import LOST
from tpcore_neuron import NativeBackend

SOME = [c for layer in matrix.AXES for dtype in ("fp32", "bf16") for c in matrix.cases(layer, dtype)[::29]]


class OnGloo(NativeBackend):
    transport = "gloo"

    def start(self, timeout: float) -> tuple[int, int]:
        return C10dBackend.start(self, timeout)

    def device(self) -> torch.device:
        return torch.device("cpu")

    def _random(self) -> object:
        return torch


def on_gloo() -> list[str]:
    ctx = tpcore.init(backend=OnGloo(), tp=2)
    found = matrix.run(ctx, SOME)
    for primitive in collectives.PRIMITIVES:
        found += collectives.groups(ctx, primitive) + collectives.right_values(ctx, primitive, torch.float32, LOST)
    tpcore.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("native")
def test_layers_and_primitives() -> None:
    assert tpcore.launch(on_gloo, 4) == [[]] * 4
