"""This machine's packages and NeuronCores, and the sizes of a job that the hardware supports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tpcore.errors import BackendError
from tpcore.layout.mesh import Group
from tpcore.settings import LOCAL_RANK

from .settings import CORES

XLA_LINE = "2.9"
"""The version of torch, torch-xla and torch-neuronx: the last for which there is a PyTorch/XLA."""

INSTALL = (
    "Trn1 and Inf2 need torch 2.9, torch-xla 2.9 and torch-neuronx 2.9:\n"
    "    pip install 'tpcore[neuron]' --extra-index-url https://pip.repos.neuron.amazonaws.com\n"
)
_DEVICES = "/dev"
_CORES_PER_DEVICE = {"trn1": 2, "inf2": 2, "trn2": 8}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def has_native() -> bool:
    """Whether the installed torch-neuronx is the native one (2.13 and later), which needs no torch_xla."""
    found = installed("torch-neuronx")
    if found is None or find_spec("torch_xla") is not None:
        return False
    return tuple(int(part) for part in found.split(".")[:2]) >= (2, 13)


def wrong_versions() -> str | None:
    """A message about installed versions that do not work together, or None."""
    found = {name: installed(name) for name in ("torch", "torch-xla", "torch-neuronx")}
    wrong = [f"{k} {v}" for k, v in found.items() if v is not None and not f"{v}.".startswith(f"{XLA_LINE}.")]
    if not wrong:
        return None
    have = ", ".join(f"{name} {v or 'missing'}" for name, v in found.items())
    return f"{' and '.join(wrong)} cannot be used: this environment has {have}. {INSTALL}"


def neuron_devices() -> int:
    return len(list(Path(_DEVICES).glob("neuron[0-9]*")))


def visible_cores(platform: str | None) -> int | None:
    """The number of NeuronCores that this host's processes may use together; None if unknown."""
    given = CORES.get()
    # under torchrun torch_xla sets it to one core for each process: then it is no number of the host
    if given and given != LOCAL_RANK.text():
        spans = (part.partition("-") for part in given.split(","))
        return sum(int(high or low) - int(low) + 1 for low, _, high in spans)
    per_device = _CORES_PER_DEVICE.get(platform or "")
    return None if per_device is None else neuron_devices() * per_device


def check_cores(platform: str | None, local: int, cores: int | None) -> None:
    """Raise BackendError for a number of processes on this host that the hardware does not support."""
    if cores is not None and local > cores:
        raise BackendError(
            f"{local} processes were started on this host, which shows {cores} NeuronCores, and each needs "
            f"one: start {cores}, or make more visible ({CORES.name})"
        )
    if platform == "trn1" and not _trn1(local):
        raise BackendError(f"{local} processes on a Trn1 host: {_TRN1_RULE}")


def connect(device: str, processes: int) -> str:
    """Advice for an error: how to connect ``processes`` ranks with the XLA runtime of ``device``."""
    if device == "CPU":
        return (
            "on a CPU it connects no processes. Without the hardware run the ranks as replicas in one "
            f"process: tpcore_neuron.testing.run_replicas(fn, {processes})"
        )
    return (
        "start one process for each NeuronCore with torchrun, and init tpcore before anything else touches the device"
    )


def check_tp(platform: str | None, group: Group) -> None:
    """Raise BackendError for tensor-parallel groups that the hardware cannot connect."""
    if platform == "trn1" and not _trn1(group.size):
        raise BackendError(f"tp={group.size} on Trn1: {_TRN1_RULE}; contiguous groups of another size have no ring")


_TRN1_RULE = "collectives there take 1, 2, 8, 16 or a multiple of 32 NeuronCores"


def _trn1(n: int) -> bool:
    return n in (1, 2, 8, 16) or n % 32 == 0
