"""The neuron backends without their hardware: what the plugin says, and to whom."""

from __future__ import annotations

import copy
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

import tpcore
import tpcore_neuron
from tpcore.backend.interface import Capabilities
from tpcore.backend.registry import backend_class
from tpcore.layout.mesh import Mesh
from tpcore_neuron import NativeBackend, platform
from tpcore_neuron.replicas.process import Worlds

PIP_LINE = "pip install 'tpcore[neuron]' --extra-index-url https://pip.repos.neuron.amazonaws.com"
GOOD = {"torch": "2.9.1", "torch-xla": "2.9.0", "torch-neuronx": "2.9.0.2.11"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """``machine(versions, devices)``: what is installed and plugged in, as far as the backend looks."""

    def pretend(versions: dict[str, str], devices: int = 0) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(platform, "version", version)
        for name in ("torch_xla", "torch_neuronx"):
            monkeypatch.delitem(sys.modules, name, raising=False)
            if name.replace("_", "-") in versions:
                # fails when imported: asking whether the backend is usable must not import it
                (tmp_path / f"{name}.py").write_text("raise ImportError('imported by a mere question')")
            else:
                monkeypatch.setitem(sys.modules, name, None)
        for i in range(devices):
            (tmp_path / f"neuron{i}").touch()
        monkeypatch.setattr(platform, "_DEVICES", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delenv("PJRT_DEVICE", raising=False)

    return pretend


@pytest.mark.parametrize(
    ("versions", "devices", "said"),
    [
        ({"torch": "2.13.0"}, 0, "tpcore[neuron-native]"),
        (GOOD | {"torch": "2.8.0"}, 1, "torch 2.8.0 cannot be used: this environment has torch 2.8.0,"),
        (GOOD | {"torch-neuronx": "1.0"}, 1, "torch-neuronx 1.0 cannot be used"),
        ({"torch": "2.9.1", "torch-xla": "2.9.0"}, 1, "torch_neuronx is not installed"),
        (GOOD, 0, "no NeuronCore is visible: there is no /dev/neuron0"),
    ],
    ids=["nothing", "old torch", "placeholder", "no neuronx", "no device"],
)
def test_the_reason_says_what_is_wrong_and_how_to_mend_it(machine, versions, devices, said):
    machine(versions, devices)
    reason = tpcore_neuron.NeuronBackend.unavailable()
    assert said in reason
    assert PIP_LINE in reason or "run_replicas" in reason
    with pytest.raises(tpcore.BackendError, match="backend 'neuron' cannot run here") as refused:
        tpcore.init(backend="neuron")
    assert reason in str(refused.value)
    assert not tpcore.is_initialized()


@pytest.mark.parametrize(("without", "devices", "pjrt"), [("", 1, None), ("torch-neuronx", 0, "CPU")])
def test_it_can_run_with_everything_in_place_and_on_another_pjrt_device(machine, monkeypatch, without, devices, pjrt):
    machine({name: version for name, version in GOOD.items() if name != without}, devices)
    if pjrt:
        monkeypatch.setenv("PJRT_DEVICE", pjrt)
    assert tpcore_neuron.NeuronBackend.unavailable() is None


@pytest.mark.parametrize("cores", [1, 2, 8, 16, 32, 64, 96])
def test_trn1_takes_these_numbers_of_cores(cores):
    platform.check_cores("trn1", cores, None)
    platform.check_tp("trn1", Mesh({"tp": cores}).group("tp"))


@pytest.mark.parametrize("cores", [3, 4, 6, 12, 24, 31, 48])
def test_trn1_refuses_others_with_the_rule(cores):
    rule = "collectives there take 1, 2, 8, 16 or a multiple of 32 NeuronCores"
    with pytest.raises(tpcore.BackendError, match=f"{cores} processes on a Trn1 host: {rule}"):
        platform.check_cores("trn1", cores, None)
    with pytest.raises(tpcore.BackendError, match=f"tp={cores} on Trn1: {rule}"):
        platform.check_tp("trn1", Mesh({"dp": 2, "tp": cores}).group("tp"))
    platform.check_cores("trn2", cores, None)
    platform.check_tp(None, Mesh({"tp": cores}).group("tp"))


def test_more_processes_than_cores_are_refused():
    with pytest.raises(tpcore.BackendError, match=r"8 processes .* shows 2 NeuronCores.*NEURON_RT_VISIBLE_CORES"):
        platform.check_cores("inf2", 8, 2)


@pytest.mark.parametrize(
    ("given", "local_rank", "cores"), [("0-7", "0", 8), ("0,2,4-5", "1", 4), ("3", "3", 4), (None, None, 4)]
)
def test_visible_cores(machine, monkeypatch, given, local_rank, cores):
    machine(GOOD, devices=2)  # two cores on each device of Trn1
    for name, value in (("NEURON_RT_VISIBLE_CORES", given), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    assert platform.visible_cores("trn1") == cores


@pytest.mark.parametrize(("joined", "cores"), [(None, 8), ("1", 16)])
@pytest.mark.parametrize("chip", ["trn2", "trn3"])
def test_two_cores_of_a_newer_chip_are_one_unless_the_variable_says_more(machine, monkeypatch, chip, joined, cores):
    machine(GOOD, devices=2)
    for name, value in (("NEURON_RT_VISIBLE_CORES", None), ("NEURON_LOGICAL_NC_CONFIG", joined)):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    assert platform.visible_cores(chip) == cores
    assert NativeBackend.most_ranks() == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    with pytest.raises(tpcore.BackendError, match=f"32 processes were started on this host, which shows {cores}"):
        platform.check_native(NativeBackend.most_ranks())


def test_a_range_of_cores_is_refused_by_the_native_backend(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-63")
    with pytest.raises(tpcore.BackendError, match="0-63: each process of the native backend opens one core"):
        platform.check_native(None)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ["TORCH_NEURONX_ENABLE_HOST_CC=1 tensor", "/tmp/neff_cache, and", "get_fallback_ops()"]),
        ({"TORCH_NEURONX_ENABLE_HOST_CC": "1", "TORCH_NEURONX_NEFF_CACHE_DIR": "/fsx"}, ["get_fallback_ops()"]),
        ({"NEURON_RT_VISIBLE_CORES": "0-63"}, ["HOST_CC", "0-63 is for all", "neff_cache", "get_fallback_ops()"]),
        ({"NEURON_RT_VISIBLE_CORES": "3", "LOCAL_RANK": "3"}, ["HOST_CC", "neff_cache", "get_fallback_ops()"]),
        ({"TPCORE_NEURON_LIMITS": "2.33"}, ["a stand-in on the CPU"]),
    ],
)
def test_doctor_names_what_hangs_or_surprises(monkeypatch, tmp_path, variables, said):
    for name in ("TORCH_NEURONX_ENABLE_HOST_CC", "TORCH_NEURONX_NEFF_CACHE_DIR", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "_FABRIC", str(tmp_path))
    found = platform.surprises()
    assert len(found) == len(said)
    assert all(words in sentence for words, sentence in zip(said, found, strict=True))
    assert NativeBackend.remark() == ". ".join(found)
    (tmp_path / "rdmap0").touch()
    assert not any("HOST_CC" in sentence for sentence in platform.surprises())


def test_it_says_what_it_can_do_before_anything_starts():
    cls = backend_class("neuron")
    assert cls is tpcore_neuron.NeuronBackend
    assert cls.transport_class is not None
    assert not getattr(cls.transport_class, "__abstractmethods__", None)
    assert set(Capabilities.dtypes) <= set(cls.capabilities.dtypes)
    assert not cls.capabilities.dynamic_shapes
    assert not NativeBackend.capabilities.dynamic_shapes  # what its compiler refuses
    assert cls.capabilities.group_sizes is None  # dp groups of any size; tp is asked about at init


@pytest.mark.parametrize(
    ("version", "has_xla", "backend"),
    [("2.13.1", False, "NativeBackend"), ("2.9.0", False, "NeuronBackend"), ("2.13.1", True, "NativeBackend")],
)
def test_the_installed_packages_choose_the_backend(monkeypatch, caplog, version, has_xla, backend):
    """torch_xla decides nothing: other packages of AWS bring it."""
    monkeypatch.setattr(platform, "installed", lambda name: version)
    monkeypatch.setattr(platform, "module_spec", lambda name: object() if has_xla else None)
    with caplog.at_level("INFO", "tpcore"):
        assert tpcore_neuron.tpcore_backend().__name__ == backend
    assert ("native backend" in caplog.text) == (backend == "NativeBackend")


def test_without_a_core_the_native_backend_is_unavailable(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "_DEVICES", str(tmp_path))
    assert "no NeuronCore is visible" in NativeBackend.unavailable()


def test_what_stands_for_the_world_of_each_replica_can_be_copied() -> None:
    ranks = {0: SimpleNamespace(group_count=3)}
    worlds = Worlds(lambda: ranks[0])
    assert copy.copy(worlds).group_count == worlds.group_count == 3
    with pytest.raises(AttributeError, match="group_counts"):
        _ = worlds.group_counts
