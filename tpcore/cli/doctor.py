"""The commands about this machine: ``tpcore doctor``, ``backends`` and ``compile``."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from .. import settings
from ..backend import registry
from ..errors import BackendError
from ..extras import LIBRARIES, untested
from ..runtime.init import default_backend
from .console import Table, tell

Section = dict[str, str]

_PACKAGES = (
    *("tpcore", "torch", "numpy", "safetensors", "pluggy", "transformers", "accelerate", "peft", "trl", "torch_xla"),
    *("torch-neuronx", "neuronx-cc", "neuronx-distributed", "optimum-neuron"),
)
_SHOWN = (
    *("TPCORE_", "TORCHELASTIC_", "GLOO_", "FI_", "NEURON_", "TORCH_NEURONX_", "PJRT_", "SLURM_", "OMP_"),
    *("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "CUDA_", "NCCL_", "TORCH_NCCL_"),
)
_GIB = 2**30


def report() -> dict[str, Section]:
    """Names and values by section. Only environment variables that tpcore, launchers and networks read."""
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    versions |= {f"[{extra}]": "; ".join(found) for extra in LIBRARIES if (found := untested(extra))}
    places = (path for kind in ("neuron", "nvidia") for path in sorted(Path("/dev").glob(f"{kind}[0-9]*")))
    devices = {path.name: "there" for path in places} or {"accelerators": "none"}
    efa = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    installed = {}
    for info in registry.backends():
        usable, why = ("usable", info.remark) if info.usable else ("not usable", info.reason)
        installed[info.name] = f"{info.distribution} {info.version}: {usable} here{why and ': '}{why}"
    network = {name: _read(f"/sys/class/net/{name}/operstate") for _, name in socket.if_nameindex()}
    env = {name: value for name, value in settings.environment().items() if name.startswith(_SHOWN)}
    return {
        "versions": versions,
        "machine": _machine(),
        "devices": {**devices, "EFA or InfiniBand": ", ".join(efa) or "none"},
        "network": {name: state or "state unknown" for name, state in network.items()},
        "environment": dict(sorted(env.items())) or {"variables of tpcore, launchers and networks": "none is set"},
        "backends": installed or {"installed": "none: install tpcore again"},
        "what init() would choose": _choice(),
    }


def _machine() -> Section:
    memory = "not there: ranks exchange tensors over sockets"
    if os.path.isdir("/dev/shm"):
        disk = shutil.disk_usage("/dev/shm")
        memory = f"{disk.free / _GIB:.2f} GiB free of {disk.total / _GIB:.2f}"
    try:
        name = "yes" if socket.getaddrinfo(socket.gethostname(), None) else "no"
    except OSError as e:
        name = f"no, {e}"
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, {'-'.join(platform.libc_ver())}",
        "cores": f"{os.cpu_count()}, of which {len(os.sched_getaffinity(0))} for this process",
        "cores by control group": _read("/sys/fs/cgroup/cpu.max") or "no limit known",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB",
        "memory by control group": _read("/sys/fs/cgroup/memory.max") or "no limit known",
        "/dev/shm": memory,
        "host": f"name resolves: {name}",
    }


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


def doctor(as_json: bool = typer.Option(False, "--json", help="Print JSON for programs.")) -> None:
    """Print what a report of a problem needs of this machine.

    Versions, backends, cores, memory, devices and network, and what tpcore.init would choose. Nothing is sent
    anywhere, and nothing is started.

    \b
    Examples:
      tpcore doctor
      tpcore doctor --json > doctor.json

    Docs: docs/debugging.md
    """
    sections, lines = report(), []
    for section, values in sections.items():
        lines += [f"{section}:", *(f"  {name}: {value}" for name, value in values.items())]
    tell(sections, as_json, *lines)


def backends(as_json: bool = typer.Option(False, "--json", help="Print a JSON list for programs.")) -> None:
    """List the installed backends, and whether they run here.

    Why one does not is said below the table, and what carries the collectives of those that do.

    \b
    Examples:
      tpcore backends
      tpcore backends --json

    Docs: docs/getting-started.md
    """
    installed, reasons = registry.backends(), []
    table = Table("backend", "from", "usable here", "group sizes", "traces")
    for info in installed:
        usable, sizes, traces = "yes" if info.usable else "no, see below", "?", "?"
        if info.capabilities:
            limits = info.capabilities["group_sizes"]
            sizes = "any" if limits is None else ", ".join(map(str, limits))
            traces = "yes" if info.capabilities["tracing"] else "no"
        table.add_row(info.name, f"{info.distribution} {info.version}", usable, sizes, traces)
        if text := info.remark if info.usable else info.reason:
            reasons.append(f"\n{info.name}: {text}")  # outside the table, which may break lines
    reasons += [f"\n{sentence}" for extra in LIBRARIES for sentence in untested(extra)]
    tell([asdict(info) for info in installed], as_json, table, *reasons)


def compile_ahead(
    command: list[str] = typer.Argument(..., help="What starts a rank, after --."),
    nprocs: int | None = typer.Option(None, "--nprocs", min=1, help="Ranks; default: as torchrun is told."),
    backend: str = typer.Option("neuron", "--backend", help="Whose programs."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list for programs."),
) -> None:
    """Run a script without a device, and list what it compiles.

    Each distinct program, with how often it runs, is compiled before a device is rented.

    \b
    Examples:
      tpcore compile --nprocs 2 -- python train.py --steps 3
      tpcore compile --json -- torchrun --nproc-per-node 2 train.py

    Docs: docs/neuron.md
    """
    programs = registry.backend_class(backend).compile_ahead(command, nprocs)
    numbers = "runs", "operations"
    table = Table("program", *numbers, "parameters", "collectives", "at", right=numbers)
    for info in programs:
        size, site = f"{info.parameter_bytes / 1e6:.3g} MB", os.path.relpath(info.site.partition(" in ")[0])
        table.add_row(info.digest, str(info.runs), str(info.operations), size, info.collectives or "none", site)
    tell([asdict(info) for info in programs], as_json, table)
