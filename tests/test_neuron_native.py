"""The native Neuron backend over gloo, by its two parameters, in real processes."""

from __future__ import annotations

import pytest
import torch
import tpcore_neuron
from tpcore_neuron import NativeBackend, platform

import tpcore
from tpcore.testing import matrix
from tpcore.testing.kit import collectives

pytestmark = pytest.mark.xdist_group("native")
SOME = [c for layer in matrix.AXES for dtype in ("fp32", "bf16") for c in matrix.cases(layer, dtype)[::29]]


def on_gloo() -> list[str]:
    ctx = tpcore.init(backend=NativeBackend("cpu", "gloo"), tp=2)
    found = matrix.run(ctx, SOME)
    for primitive in collectives.PRIMITIVES:
        found += collectives.groups(ctx, primitive) + collectives.right_values(ctx, primitive, torch.float32)
    tpcore.shutdown()
    return found


@pytest.mark.slow
def test_layers_and_primitives():
    assert tpcore.launch(on_gloo, 4) == [[]] * 4


@pytest.mark.parametrize(
    ("version", "has_xla", "backend"),
    [("2.13.1", False, "NativeBackend"), ("2.9.0", False, "NeuronBackend"), ("2.13.1", True, "NeuronBackend")],
)
def test_the_installed_packages_choose_the_backend(monkeypatch, caplog, version, has_xla, backend):
    monkeypatch.setattr(platform, "installed", lambda name: version)
    monkeypatch.setattr(platform, "find_spec", lambda name: object() if has_xla else None)
    with caplog.at_level("INFO", "tpcore"):
        assert tpcore_neuron.tpcore_backend().__name__ == backend
    assert ("native backend" in caplog.text) == (backend == "NativeBackend")


def test_without_a_core_the_native_backend_is_unavailable(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "_DEVICES", str(tmp_path))
    assert "no NeuronCore is visible" in NativeBackend.unavailable()
