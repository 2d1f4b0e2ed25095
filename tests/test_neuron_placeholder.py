"""The neuron backend of this release: named, listed, and truthful about what it cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tpcore_neuron

import tpcore
from tpcore.backend import backend_class
from tpcore.mesh import Mesh

PIP_LINE = "pip install 'tpcore[neuron]' --extra-index-url https://pip.repos.neuron.amazonaws.com"
NOT_YET = "does not include the XLA collectives yet; use backend='cpu_gloo'"


@pytest.fixture(params=[False, True], ids=["without torch_xla", "with torch_xla"])
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        # fails when imported: asking whether the backend is usable must not import it
        (tmp_path / "torch_xla.py").write_text("raise ImportError('imported by a mere question')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch_xla", None)
    return request.param


def test_the_reason_says_what_to_install_and_what_this_release_lacks(installed):
    reason = tpcore_neuron.NeuronBackend.unavailable()
    assert NOT_YET in reason
    assert (PIP_LINE in reason) is not installed
    assert all(f"{name} 2.9" in reason for name in ("torch", "torch-xla", "torch-neuronx")) is not installed


def test_init_refuses_with_the_reason(installed):
    with pytest.raises(tpcore.BackendError, match="backend 'neuron' cannot run here") as refused:
        tpcore.init(backend="neuron")
    assert tpcore_neuron.NeuronBackend.unavailable() in str(refused.value)
    assert not tpcore.is_initialized()


@pytest.mark.parametrize(
    "use",
    [
        lambda backend: backend.start(1.0),
        lambda backend: backend.comm(Mesh({"tp": 1}).group("tp"), 0),
        lambda backend: backend.device(),
    ],
    ids=["start", "comm", "device"],
)
def test_an_instance_made_by_hand_does_nothing_silently(installed, use):
    backend = tpcore_neuron.NeuronBackend()
    with pytest.raises(tpcore.BackendError) as refused:
        use(backend)
    assert backend.unavailable() in str(refused.value)


def test_the_plugin_is_registered_under_its_name():
    assert backend_class("neuron") is tpcore_neuron.NeuronBackend


def test_importing_the_plugin_imports_nothing_of_the_neuron_stack():
    code = "import sys, tpcore_neuron; print(sorted({'torch_xla', 'torch_neuronx'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
