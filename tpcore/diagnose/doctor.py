"""The facts about a machine that belong in a report of a problem. It starts and sends nothing."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import settings
from ..backend import registry
from ..errors import BackendError
from ..runtime.init import default_backend

Section = dict[str, str]

_PACKAGES = (
    "tpcore",
    "torch",
    "numpy",
    "safetensors",
    "pluggy",
    "transformers",
    "accelerate",
    "torch_xla",
    "torch-neuronx",
    "neuronx-cc",
    "neuronx-distributed",
    "optimum-neuron",
)
_SHOWN = (
    "TPCORE_",
    "TORCHELASTIC_",
    "GLOO_",
    "FI_",
    "NEURON_",
    "PJRT_",
    "SLURM_",
    "OMP_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
)
_GIB = 2**30


def report() -> dict[str, Section]:
    """Names and values by section, all strings. It has only environment variables that tpcore, launchers and
    networks read: others may be secret."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "devices": _devices(),
        "network": _network(),
        "environment": _environment(),
        "backends": _backends(),
        "what init() would choose": _choice(),
    }


def _versions() -> Section:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _machine() -> Section:
    disk = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    memory = _read("/proc/meminfo")
    total = next((line.split()[1] for line in memory.splitlines() if line.startswith("MemTotal")), "0")
    libc = "-".join(platform.libc_ver())
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, {libc}",
        "cores": f"{os.cpu_count()}, of which {len(os.sched_getaffinity(0))} for this process",
        "cores by control group": _read("/sys/fs/cgroup/cpu.max") or "no limit known",
        "memory": f"{int(total) * 1024 / _GIB:.1f} GiB",
        "memory by control group": _read("/sys/fs/cgroup/memory.max") or "no limit known",
        "/dev/shm": "not there: ranks exchange tensors over sockets"
        if disk is None
        else f"{disk.free / _GIB:.2f} GiB free of {disk.total / _GIB:.2f}",
        "host": f"name resolves: {_resolves(socket.gethostname())}",
    }


def _devices() -> Section:
    found = {path.name: "there" for path in sorted(Path("/dev").glob("neuron[0-9]*"))}
    found |= {path.name: "there" for path in sorted(Path("/dev").glob("nvidia[0-9]*"))}
    efa = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    return {**(found or {"accelerators": "none"}), "EFA or InfiniBand": ", ".join(efa) or "none"}


def _network() -> Section:
    return {name: _read(f"/sys/class/net/{name}/operstate") or "state unknown" for _, name in socket.if_nameindex()}


def _environment() -> Section:
    shown = {name: value for name, value in settings.environment().items() if name.startswith(_SHOWN)}
    return dict(sorted(shown.items())) or {"variables of tpcore, launchers and networks": "none is set"}


def _backends() -> Section:
    return {
        info.name: f"{info.distribution} {info.version}: "
        + ("usable here" if info.usable else f"not usable here: {info.reason}")
        for info in registry.backends()
    } or {"installed": "none: pip install 'tpcore[cpu]'"}


def _choice() -> Section:
    try:
        backend = "{} ({})".format(*default_backend())
    except BackendError as e:
        backend = f"none: {e}"
    world = settings.WORLD_SIZE
    job = f"rank {settings.RANK.text()} of {world.text()}" if world.is_set else "no launcher: one process"
    return {"backend": backend, "job": job}


def _read(path: str) -> str:
    """The first bytes of a file of the system, or nothing where it is not there."""
    try:
        with open(path) as f:
            return f.read(1 << 16).strip()
    except OSError:
        return ""


def _resolves(name: str) -> str:
    try:
        return "yes" if socket.getaddrinfo(name, None) else "no"
    except OSError as e:
        return f"no, {e}"
